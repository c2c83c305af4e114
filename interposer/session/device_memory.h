/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Physical memory of a device at addresses of its own (CUDA's virtual memory management). No handle
 * is kept: memory lives as long as it is mapped, and what is mapped tells its handle
 * (cuMemRetainAllocationHandle). So there is no moment at which a thread that is stopped holds one.
 *
 * All return 0 or a CUresult.
 */
#ifndef LIVESHIFT_INTERPOSER_DEVICE_MEMORY_H
#define LIVESHIFT_INTERPOSER_DEVICE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* What sizes are to be multiples of, 0: the device can't do it, or not with descriptors. */
size_t memory_granularity(int32_t device);

/* Fresh memory at fresh addresses, accessible from `accessors` (bits) and its own device. */
int memory_make(int32_t device, size_t size, uint64_t accessors, uint64_t *address);

/* From then on accessible from `accessors` and its own device, and no longer from `never_more`. */
int memory_allow(uint64_t address, size_t size, int32_t device, uint64_t accessors,
                 uint64_t never_more);

/* The memory goes, the addresses stay; then the addresses. */
int memory_unmap(uint64_t address, size_t size);
int memory_unreserve(uint64_t address, size_t size);

/* A descriptor of what is mapped there. Not 0 as well where nothing is. */
int memory_export(uint64_t address, int *descriptor);
int memory_here(uint64_t address);

/* Puts fresh memory with the same bytes in the place of what is mapped there. Needs as much again of
   the device's memory for that moment, and a current context of the device. */
int memory_renew(uint64_t address, size_t size, int32_t device, uint64_t accessors);

/* Maps what is behind a descriptor at addresses that are reserved. Needs a current context of the
   device. The descriptor stays the caller's. */
int memory_import(uint64_t address, size_t size, int32_t device, uint64_t accessors,
                  int descriptor);

#endif
