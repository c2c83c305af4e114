/* SPDX-License-Identifier: Apache-2.0 */
#include "arena.h"

#include "arena_blocks.h"
#include "arena_devices.h"
#include "device_calls.h"
#include "ledger/graphs.h"
#include "service/service.h"
#include "session/device_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CUDA_INVALID 1

/* How many blocks the application has freed that must wait until nothing is captured. */
static _Atomic uint32_t deferred_frees;

enum { UNKNOWN, ON, OFF };
static _Atomic int setting;

static bool is_on(void) {
    int now = atomic_load_explicit(&setting, memory_order_relaxed);
    if (now == UNKNOWN) {
        const char *text = getenv("LIVESHIFT_DEVICE_ARENA");
        now = text != NULL && strcmp(text, "1") == 0 ? ON : OFF;
        atomic_store(&setting, now);
    }
    return now == ON;
}

/* Whether this thread is in capture mode relaxed. With it the application says that the thread's
   calls concern no capture that is under way. */
static bool relaxed(void) {
    int mode = cuda_relax_captures(CUDA_CAPTURES_RELAXED);
    cuda_relax_captures(mode);
    return mode == CUDA_CAPTURES_RELAXED;
}

static bool capturing(void) { return atomic_load(&captures_under_way) > 0; }

/* The device's primary context; NULL: it is not active. */
static void *primary_of(int32_t device) {
    void *context = NULL;
    unsigned flags;
    int active = 0;
    if (DEVICE_CALL(cuDevicePrimaryCtxGetState, device, &flags, &active) != CUDA_OK ||
        active == 0 || DEVICE_CALL(cuDevicePrimaryCtxRetain, &context, device) != CUDA_OK)
        return NULL;
    DEVICE_CALL(cuDevicePrimaryCtxRelease_v2, device);
    return context;
}

/* Waits for all work of a device, as cudaFree does. */
static int synchronize_device(int32_t device) {
    void *context = primary_of(device), *before = NULL;
    int result = DEVICE_CALL(cuCtxGetCurrent, &before);
    if (result != CUDA_OK || context == NULL)
        return result; /* without a context nothing is under way */
    if (context != before)
        result = DEVICE_CALL(cuCtxSetCurrent, context);
    if (result == CUDA_OK)
        result = DEVICE_CALL(cuCtxSynchronize);
    if (context != before)
        DEVICE_CALL(cuCtxSetCurrent, before);
    return result;
}

/* The device whose primary context is current. If no context is current, this makes one as
   cudaMalloc does. -1: a call failed, or the application uses another context. Memory of cudaMalloc
   would end with that context. */
static int32_t primary_device(void) {
    static _Atomic(void *) known;
    void *context = NULL;
    int device;
    if (DEVICE_CALL(cuCtxGetCurrent, &context) != CUDA_OK || context == NULL) {
        int (*begin)(void *) = runtime_function(&known, "cudaFree");
        if (begin == NULL || CUDA_CALL(begin(NULL)) != 0 ||
            DEVICE_CALL(cuCtxGetCurrent, &context) != CUDA_OK)
            return -1;
    }
    if (DEVICE_CALL(cuCtxGetDevice, &device) != CUDA_OK)
        return -1;
    return context == primary_of(device) ? device : -1;
}

/* Unmaps a claimed block and frees its entry, after waiting until the block's memory is back. A
   thread runs while the memory is away only if CUDA holds it at its next call, such as this
   cuCtxSynchronize. */
static int end_block(struct arena_block *block) {
    uint64_t address = atomic_load(&block->address), size = atomic_load(&block->size);
    while (atomic_load(&block->released) != 0) {
        DEVICE_CALL(cuCtxSynchronize);
        task_pause();
    }
    int result = memory_unmap(address, size);
    if (result == CUDA_OK) {
        memory_unreserve(address, size);
        block_remove(block);
    }
    return result;
}

static void free_deferred(void) {
    if (atomic_load_explicit(&deferred_frees, memory_order_relaxed) == 0 || capturing())
        return;
    for (uint32_t i = 0; i < blocks_used(); i++) {
        struct arena_block *block = block_by_index(i);
        if (atomic_load(&block->state) != BLOCK_FREE_DEFERRED ||
            !block_claim(block, BLOCK_FREE_DEFERRED, BLOCK_FREEING))
            continue;
        atomic_fetch_sub(&deferred_frees, 1);
        if (synchronize_device(atomic_load(&block->device)) == CUDA_OK)
            end_block(block);
    }
}

/* Applies the changes of peer access that came while the block was made. A thread that enables a
   peer changes the accessors first, then looks at the blocks. So either it has seen the new block,
   or this function sees its change. */
static void apply_peer_changes(const struct arena_allocation *made, uint64_t allowed) {
    uint64_t now;
    while ((now = arena_accessors(made->device)) != allowed) {
        memory_allow(made->address, made->size, made->device, now, allowed & ~now);
        allowed = now;
    }
}

bool arena_allocate(size_t size, struct arena_allocation *made) {
    if (size < ARENA_LEAST || !is_on())
        return false;
    free_deferred();
    if (capturing() && !relaxed())
        return false; /* the real cudaMalloc spoils the capture and returns an error */
    int32_t device = primary_device();
    size_t granularity = arena_supports(device) ? memory_granularity(device) : 0;
    if (granularity == 0)
        return false;
    size_t rounded = (size + granularity - 1) / granularity * granularity;
    if (rounded < size || rounded - size > size / 8)
        return false;
    uint64_t allowed = arena_accessors(device);
    *made = (struct arena_allocation){0, rounded, device};
    if (memory_make(device, rounded, allowed, &made->address) != CUDA_OK)
        return false;
    if (block_add(made->address, rounded, device) == NULL) {
        memory_unmap(made->address, rounded);
        memory_unreserve(made->address, rounded);
        return false;
    }
    apply_peer_changes(made, allowed);
    return true;
}

bool arena_has(uint64_t address) { return block_at(address) != NULL; }

int arena_free(uint64_t address) {
    struct arena_block *block = block_at(address);
    if (block == NULL)
        return CUDA_INVALID;
    free_deferred();
    if (capturing() && relaxed()) { /* the free is allowed, but waiting would spoil the capture */
        if (!block_claim(block, BLOCK_LIVE, BLOCK_FREE_DEFERRED))
            return CUDA_INVALID;
        atomic_fetch_add(&deferred_frees, 1);
        return CUDA_OK;
    }
    int result = synchronize_device(atomic_load(&block->device));
    if (result != CUDA_OK)
        return result;
    if (!block_claim(block, BLOCK_LIVE, BLOCK_FREEING))
        return CUDA_INVALID;
    result = end_block(block);
    if (result != CUDA_OK)
        block_restore(block);
    return result;
}

void arena_reset(int32_t device) {
    if (blocks_in_use() == 0 || device < 0 || device >= ARENA_DEVICES)
        return;
    for (uint32_t i = 0; i < blocks_used(); i++) {
        struct arena_block *block = block_by_index(i);
        uint32_t state = atomic_load(&block->state);
        if ((state != BLOCK_LIVE && state != BLOCK_FREE_DEFERRED) ||
            atomic_load(&block->device) != device || !block_claim(block, state, BLOCK_FREEING))
            continue;
        if (state == BLOCK_FREE_DEFERRED)
            atomic_fetch_sub(&deferred_frees, 1);
        end_block(block);
    }
    arena_forget_peers(device);
}

bool arena_is_stale(int32_t device) { return blocks_in_use() > 0 && primary_of(device) == NULL; }

void arena_ipc_refused(uint64_t address) {
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    if (block_containing(address) == NULL)
        return;
    atomic_store(&setting, OFF);
    if (!atomic_flag_test_and_set(&warned))
        dprintf(STDERR_FILENO,
                "liveshift: CUDA gives no IPC handles of memory in liveshift's arena; from now on "
                "cudaMalloc is the driver's here, and with LIVESHIFT_DEVICE_ARENA=0 in the job's "
                "environment it is from the start (such a job can't be moved either way)\n");
}
