/* SPDX-License-Identifier: Apache-2.0 */
#include "arena_devices.h"

#include "arena_blocks.h"
#include "device_calls.h"
#include "session/device_memory.h"

#include <stdlib.h>

/* Sets of devices, as bits: those that may access a device's memory, and those on which the arena
   may have allocated. */
static _Atomic uint64_t accessors[ARENA_DEVICES];
static _Atomic uint64_t used_devices;

static uint64_t bit(int32_t device) { return (uint64_t)1 << device; }

static bool are_peers(int one, int other) {
    int there = 0, back = 0;
    return DEVICE_CALL(cuDeviceCanAccessPeer, &there, one, other) == CUDA_OK && there != 0 &&
           DEVICE_CALL(cuDeviceCanAccessPeer, &back, other, one) == CUDA_OK && back != 0;
}

static bool all_are_peers(void) {
    int many = 0;
    if (DEVICE_CALL(cuDeviceGetCount, &many) != CUDA_OK || many > ARENA_DEVICES)
        return false;
    if (many > 1 && getenv("LOCAL_RANK") != NULL)
        return true;
    for (int one = 0; one < many; one++)
        for (int other = 0; other < one; other++)
            if (!are_peers(one, other))
                return false;
    return true;
}

bool arena_supports(int32_t device) {
    enum { UNKNOWN, YES, NO };
    static _Atomic int peers;
    if (device < 0 || device >= ARENA_DEVICES)
        return false;
    if (atomic_load(&peers) == UNKNOWN)
        atomic_store(&peers, all_are_peers() ? YES : NO);
    if (atomic_load(&peers) == NO)
        return false;
    uint64_t before = atomic_fetch_or(&used_devices, bit(device));
    if ((before & bit(device)) == 0)
        for (int32_t other = 0; other < ARENA_DEVICES; other++)
            if ((before & bit(other)) != 0 && are_peers(device, other)) {
                arena_peer(device, other, true);
                arena_peer(other, device, true);
            }
    return true;
}

uint64_t arena_accessors(int32_t device) {
    return device >= 0 && device < ARENA_DEVICES ? atomic_load(&accessors[device]) : 0;
}

void arena_peer(int32_t device, int32_t other, bool may) {
    if (device < 0 || device >= ARENA_DEVICES || other < 0 || other >= ARENA_DEVICES ||
        device == other)
        return;
    if (may)
        atomic_fetch_or(&accessors[other], bit(device));
    else
        atomic_fetch_and(&accessors[other], ~bit(device));
    for (uint32_t i = 0; i < blocks_used(); i++) {
        struct arena_block *block = block_by_index(i);
        if (atomic_load(&block->state) == BLOCK_LIVE && atomic_load(&block->device) == other &&
            atomic_load(&block->released) == 0)
            memory_allow(atomic_load(&block->address), atomic_load(&block->size), other,
                         arena_accessors(other), may ? 0 : bit(device));
    }
}

int32_t arena_device_of(void *context) {
    void *before = NULL;
    int device = -1;
    if (DEVICE_CALL(cuCtxGetCurrent, &before) != CUDA_OK ||
        DEVICE_CALL(cuCtxSetCurrent, context) != CUDA_OK)
        return -1;
    if (DEVICE_CALL(cuCtxGetDevice, &device) != CUDA_OK)
        device = -1;
    DEVICE_CALL(cuCtxSetCurrent, before);
    return device;
}

/* Peer access ends when either device is reset. */
void arena_forget_peers(int32_t device) {
    atomic_store(&accessors[device], 0);
    for (int32_t other = 0; other < ARENA_DEVICES; other++)
        if ((arena_accessors(other) & bit(device)) != 0)
            arena_peer(device, other, false);
    atomic_fetch_and(&used_devices, ~bit(device));
}
