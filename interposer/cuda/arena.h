/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena: what cudaMalloc gives out where LIVESHIFT_DEVICE_ARENA=1 is in the environment, as
 * physical memory that is mapped at addresses of its own. A device session can take that memory away
 * and give it back, perhaps other memory of another GPU, while the addresses stay; so a move needs
 * not copy it through the process's own memory.
 *
 * To the application it is cudaMalloc's memory, but for cudaIpcGetMemHandle, which CUDA doesn't do
 * for it. Pieces below 2 MiB, or whose rounding up would waste more than an eighth, and everything
 * that can't be had this way are the driver's as ever. So is what is allocated by other functions.
 *
 * While a block's memory is given up every thread that could touch it is held, or waits inside CUDA.
 * One that was stopped in the midst of something here does no harm:
 * - Between making memory and entering the block: nobody knows of the memory, it stays, and the
 *   driver's own checkpoint takes it along.
 * - Between claiming a block and unmapping it: it is still in the table, is given up and comes back
 *   like the others, and is unmapped then.
 * - Behind unmapping it: there is no memory any more, which `memory_here` tells.
 * - While it makes blocks accessible to another device: `accessors` was changed first, and whoever
 *   maps memory looks there. It may then find some blocks unmapped, which is no error.
 */
#ifndef LIVESHIFT_INTERPOSER_ARENA_H
#define LIVESHIFT_INTERPOSER_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARENA_LEAST ((size_t)2 << 20)

struct arena_made {
    uint64_t address, size; /* as rounded up */
    int32_t device;
};

/* false: it is cudaMalloc's to do. */
bool arena_allocate(size_t size, struct arena_made *made);

/* Whether a block begins there. Freeing it, as cudaFree does: first all work of its device is
   waited for. The result is CUDA's. */
bool arena_has(uint64_t address);
int arena_free(uint64_t address);

/* The device has been reset, so that its blocks are gone, too. Whether its primary context has ended
   without that, and there are blocks. */
void arena_reset(int32_t device);
bool arena_outlived(int32_t device);

/* An IPC handle of an address was asked for, and CUDA's result was an error. */
void arena_not_shared(uint64_t address);

#endif
