/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena: device memory that cudaMalloc gives out where LIVESHIFT_DEVICE_ARENA=1 is in the
 * environment. It is physical memory that the interposer maps at addresses of its own. A device
 * session can take this memory away and give memory back, perhaps of another GPU, while the
 * addresses stay. So a move need not copy it through the process's host memory.
 *
 * To the application it is memory of cudaMalloc, except that CUDA makes no IPC handle of it
 * (cudaIpcGetMemHandle fails). The driver itself allocates pieces below 2 MiB, pieces whose
 * rounding up would waste more than an eighth, pieces for which the arena has no memory, and
 * everything that the application allocates by other functions.
 *
 * While a block's memory is away, every thread that could touch it is held, or waits inside CUDA.
 * A thread that was stopped in the middle of the arena's code does no harm:
 * - Between making memory and entering the block: no table names the memory. It stays, and the
 *   driver's own checkpoint takes it along.
 * - Between claiming a block and unmapping it: the block is still in the table. Its memory is
 *   released and mapped again like that of the others, and the thread unmaps it then.
 * - After unmapping it: the block has no memory any more; `memory_is_mapped` finds that out.
 * - While it makes blocks accessible to another device: it changed `accessors` first, and the
 *   session reads `accessors` when it maps memory. The thread may then find blocks that are not
 *   mapped, which is no error.
 */
#ifndef LIVESHIFT_INTERPOSER_ARENA_H
#define LIVESHIFT_INTERPOSER_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARENA_LEAST ((size_t)2 << 20)

struct arena_allocation {
    uint64_t address, size; /* as rounded up */
    int32_t device;
};

/* Allocates from the arena. False: the arena does not serve this; call the real cudaMalloc. */
bool arena_allocate(size_t size, struct arena_allocation *made);

/* arena_has: whether a block begins at the address. arena_free: frees that block as cudaFree does,
   after all work of its device has finished; returns CUDA's result. */
bool arena_has(uint64_t address);
int arena_free(uint64_t address);

/* arena_reset: the device has been reset, so unmap and forget its blocks. arena_is_stale: whether
   the device still has blocks although its primary context has ended without a reset. */
void arena_reset(int32_t device);
bool arena_is_stale(int32_t device);

/* The application asked for an IPC handle of this address, and CUDA returned an error. */
void arena_ipc_refused(uint64_t address);

#endif
