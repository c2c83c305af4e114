/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Physical memory of a device at addresses of its own (CUDA's virtual memory management). The
 * interposer keeps no handles: memory lives as long as it is mapped, and
 * cuMemRetainAllocationHandle gives the handle of mapped memory. So a stopped thread never holds
 * the only handle.
 *
 * Functions of type int return 0 or a CUresult.
 */
#ifndef LIVESHIFT_INTERPOSER_DEVICE_MEMORY_H
#define LIVESHIFT_INTERPOSER_DEVICE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* Sizes must be multiples of this. 0: the device has no such memory, or can't export it by
   descriptor. */
size_t memory_granularity(int32_t device);

/* Makes memory at new addresses, accessible from `accessors` (bits) and from its own device. */
int memory_make(int32_t device, size_t size, uint64_t accessors, uint64_t *address);

/* Makes memory accessible from `accessors` and its own device, and no longer from `never_more`. */
int memory_allow(uint64_t address, size_t size, int32_t device, uint64_t accessors,
                 uint64_t never_more);

/* memory_unmap frees the memory; its addresses stay reserved. memory_unreserve frees these. */
int memory_unmap(uint64_t address, size_t size);
int memory_unreserve(uint64_t address, size_t size);

/* memory_export makes a descriptor of the memory mapped at an address. memory_is_mapped only
   checks. Both return a CUDA error if nothing is mapped there. */
int memory_export(uint64_t address, int *descriptor);
int memory_is_mapped(uint64_t address);

/* Replaces the memory mapped at an address by new memory with the same bytes. For that moment it
   needs the same amount of device memory again. It needs a current context of the device. */
int memory_renew(uint64_t address, size_t size, int32_t device, uint64_t accessors);

/* Maps the memory behind a descriptor at reserved addresses. Needs a current context of the device.
   The caller keeps the descriptor. */
int memory_import(uint64_t address, size_t size, int32_t device, uint64_t accessors,
                  int descriptor);

#endif
