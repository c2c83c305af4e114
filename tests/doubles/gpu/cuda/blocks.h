/* SPDX-License-Identifier: Apache-2.0 */
/* The ranges of addresses that CUDA knows: device memory, pinned host memory, mapped handles. */
#ifndef SIMCUDA_BLOCKS_H
#define SIMCUDA_BLOCKS_H

#include "device.h"

#include <pthread.h>
#include <stdbool.h>

enum block_kind {
    BLOCK_DEVICE,
    BLOCK_POOL,
    BLOCK_MANAGED,
    BLOCK_HOST,
    BLOCK_REGISTERED,
    BLOCK_IPC,
    BLOCK_MAPPED,
};

struct block {
    uintptr_t base;
    size_t size;
    enum block_kind kind;
    CUdevice device;
    unsigned int flags;
    unsigned long long id;
    /* Bytes of the device's memory that it takes. */
    size_t charged;
    /* BLOCK_POOL: whose it is. */
    CUmemoryPool pool;
    /* BLOCK_DEVICE whose IPC handle was asked for: the shared memory beneath it; else -1. */
    int shared;
    /* BLOCK_MAPPED. */
    CUmemGenericAllocationHandle handle;
    CUmemAccess_flags access[MAX_DEVICES];
    /* The content while checkpointed. */
    void *saved;
};

/* Guards the blocks, pools and VMM handles. */
extern pthread_mutex_t blocks_lock;

/* Takes device memory: charged, mapped, zeroed only by chance. */
CUresult block_allocate(enum block_kind kind, CUdevice device, size_t bytes, CUmemoryPool pool,
                        CUdeviceptr *pointer);
/* Frees the block of one of two kinds that begins there; CUDA_ERROR_INVALID_VALUE: there is none. */
CUresult block_free(uintptr_t base, enum block_kind kind, enum block_kind other);
void blocks_free_device(CUdevice device);

/* With blocks_lock held ------------------------------------------------------------------------- */

/* The block that holds the address, or NULL. Valid until a block is added or removed. */
struct block *block_at(uintptr_t address);
/* Adds a block, which must overlap none. */
struct block *block_add(struct block block);
void block_remove(struct block *block);
/* All blocks by address. */
struct block *blocks_all(size_t *count);

/* Rounds up to whole pages. */
size_t whole_pages(size_t bytes);

#endif
