/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which devices the arena serves, and which device may access the memory of which other device.
 * cudaDeviceEnablePeerAccess makes all memory of cudaMalloc accessible to a peer at once. For
 * mapped memory the access must be set for each piece.
 *
 * Copies between devices need care, too. Where peers can't access each other, cudaMemcpy stages
 * memory of cudaMalloc, but not mapped memory. So a process that may use several devices gets an
 * arena only if these devices are peers, and the devices on which it allocates may access each
 * other's memory from the start. (A process with a LOCAL_RANK uses one of the devices it sees.)
 */
#ifndef LIVESHIFT_INTERPOSER_ARENA_DEVICES_H
#define LIVESHIFT_INTERPOSER_ARENA_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#define ARENA_DEVICES 64 /* bits of a set */

/* Whether the arena may use this device's memory. The caller asks before each allocation. */
bool arena_supports(int32_t device);

/* The devices that may access the memory of this device, as bits. */
uint64_t arena_accessors(int32_t device);

/* From now on `device` may, or may not, access the memory of `other`. */
void arena_peer(int32_t device, int32_t other, bool may);

/* The device of a context; -1: the context has none. */
int32_t arena_device_of(void *context);

void arena_forget_peers(int32_t device);

#endif
