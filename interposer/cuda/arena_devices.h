/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which devices the arena serves, and which of them may access whose memory. Memory of cudaMalloc
 * becomes accessible to a peer by cudaDeviceEnablePeerAccess, all of it at once; memory that is
 * mapped has to be told for each piece.
 *
 * Copies between devices are the other matter: cudaMemcpy stages cudaMalloc's memory where peers
 * can't access each other, and not memory that is mapped. So a process that may use several devices
 * gets an arena only if they are peers, and those on which it allocates may access each other's from
 * the start. (A process that has a LOCAL_RANK uses one of those that it sees.)
 */
#ifndef LIVESHIFT_INTERPOSER_ARENA_DEVICES_H
#define LIVESHIFT_INTERPOSER_ARENA_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#define ARENA_DEVICES 64 /* bits of a set */

/* Whether a device's memory can be the arena's. To be asked before each allocation. */
bool arena_serves(int32_t device);

/* The devices that may access the memory of one, as bits. */
uint64_t arena_accessors(int32_t device);

/* A device may access the memory of another from now on, or no longer. */
void arena_peer(int32_t device, int32_t other, bool may);

/* The device of a context; -1: it has none. */
int32_t arena_device_of(void *context);

void arena_forget_peers(int32_t device);

#endif
