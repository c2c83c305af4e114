/* SPDX-License-Identifier: Apache-2.0 */
#include "device_memory.h"

#include "cuda/device_calls.h"

/* Numbers of cuda.h. */
#define PINNED 1                /* CU_MEM_ALLOCATION_TYPE_PINNED */
#define DESCRIPTOR 1            /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
#define READ_AND_WRITE 3        /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */
#define HAS_VIRTUAL_MEMORY 102  /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
#define HAS_DESCRIPTORS 103     /* …_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
#define HAS_RDMA_OF_VIRTUAL 110 /* …_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
#define LEAST 0                 /* CU_MEM_ALLOC_GRANULARITY_MINIMUM */

static bool has(int32_t device, int attribute) {
    int value = 0;
    return DEVICE_CALL(cuDeviceGetAttribute, &value, attribute, device) == CUDA_OK && value != 0;
}

/* Like memory of cudaMalloc: an RDMA driver may register it where the device allows that. */
static struct physical_properties properties_of(int32_t device) {
    struct physical_properties wanted = {
        .type = PINNED, .handle_types = DESCRIPTOR, .location = {LOCATION_DEVICE, device}};
    wanted.flags.rdma_capable = has(device, HAS_RDMA_OF_VIRTUAL);
    return wanted;
}

size_t memory_granularity(int32_t device) {
    struct physical_properties wanted = properties_of(device);
    size_t least = 0;
    if (!has(device, HAS_VIRTUAL_MEMORY) || !has(device, HAS_DESCRIPTORS) ||
        DEVICE_CALL(cuMemGetAllocationGranularity, &least, &wanted, LEAST) != CUDA_OK)
        return 0;
    return least;
}

int memory_allow(uint64_t address, size_t size, int32_t device, uint64_t accessors,
                 uint64_t never_more) {
    struct memory_access allowed[64];
    unsigned many = 0;
    accessors |= (uint64_t)1 << device;
    for (int other = 0; other < 64; other++)
        if (((accessors | never_more) >> other & 1) != 0)
            allowed[many++] = (struct memory_access){
                {LOCATION_DEVICE, other}, (accessors >> other & 1) != 0 ? READ_AND_WRITE : 0};
    return DEVICE_CALL(cuMemSetAccess, address, size, allowed, many);
}

/* Gets another handle of the memory that is mapped at an address. */
static int retain(uint64_t address, unsigned long long *handle) {
    return DEVICE_CALL(cuMemRetainAllocationHandle, handle, (void *)(uintptr_t)address);
}

/* Maps the memory of a handle. Mapped memory stays when its handle is released. */
static int map(uint64_t address, size_t size, int32_t device, uint64_t accessors,
               unsigned long long handle) {
    int result = DEVICE_CALL(cuMemMap, address, size, 0, handle, 0);
    if (result != CUDA_OK)
        return result;
    result = memory_allow(address, size, device, accessors, 0);
    if (result != CUDA_OK)
        memory_unmap(address, size);
    return result;
}

int memory_make(int32_t device, size_t size, uint64_t accessors, uint64_t *address) {
    struct physical_properties wanted = properties_of(device);
    unsigned long long handle, at;
    int result = DEVICE_CALL(cuMemCreate, &handle, size, &wanted, 0);
    if (result != CUDA_OK)
        return result;
    result = DEVICE_CALL(cuMemAddressReserve, &at, size, 0, 0, 0);
    if (result == CUDA_OK) {
        result = map(at, size, device, accessors, handle);
        if (result != CUDA_OK)
            memory_unreserve(at, size);
    }
    DEVICE_CALL(cuMemRelease, handle);
    if (result == CUDA_OK)
        *address = at;
    return result;
}

int memory_unmap(uint64_t address, size_t size) { return DEVICE_CALL(cuMemUnmap, address, size); }

int memory_unreserve(uint64_t address, size_t size) {
    return DEVICE_CALL(cuMemAddressFree, address, size);
}

int memory_is_mapped(uint64_t address) {
    unsigned long long handle;
    int result = retain(address, &handle);
    if (result == CUDA_OK)
        DEVICE_CALL(cuMemRelease, handle);
    return result;
}

int memory_export(uint64_t address, int *descriptor) {
    unsigned long long handle;
    int result = retain(address, &handle);
    if (result != CUDA_OK)
        return result;
    result = DEVICE_CALL(cuMemExportToShareableHandle, descriptor, handle, DESCRIPTOR, 0);
    DEVICE_CALL(cuMemRelease, handle);
    return result;
}

/* Maps the memory that is mapped at `fresh` also at `address`, in place of what was mapped there.
   If that fails, it maps the old memory again. */
static int replace(uint64_t address, size_t size, int32_t device, uint64_t accessors,
                   uint64_t fresh) {
    unsigned long long before, now;
    int result = retain(address, &before);
    if (result != CUDA_OK)
        return result;
    result = retain(fresh, &now);
    if (result == CUDA_OK) {
        result = memory_unmap(address, size);
        if (result == CUDA_OK) {
            result = map(address, size, device, accessors, now);
            if (result != CUDA_OK)
                map(address, size, device, accessors, before);
        }
        DEVICE_CALL(cuMemRelease, now);
    }
    DEVICE_CALL(cuMemRelease, before);
    return result;
}

int memory_renew(uint64_t address, size_t size, int32_t device, uint64_t accessors) {
    uint64_t fresh;
    int result = memory_make(device, size, 0, &fresh);
    if (result != CUDA_OK)
        return result;
    result = DEVICE_CALL(cuMemcpyDtoD_v2, fresh, address, size);
    if (result == CUDA_OK)
        result = DEVICE_CALL(cuCtxSynchronize); /* a copy from device to device may still run */
    if (result == CUDA_OK)
        result = replace(address, size, device, accessors, fresh);
    memory_unmap(fresh, size);
    memory_unreserve(fresh, size);
    return result;
}

int memory_import(uint64_t address, size_t size, int32_t device, uint64_t accessors,
                  int descriptor) {
    unsigned long long handle;
    int result = DEVICE_CALL(cuMemImportFromShareableHandle, &handle, (void *)(intptr_t)descriptor,
                             DESCRIPTOR);
    if (result != CUDA_OK)
        return result;
    result = map(address, size, device, accessors, handle);
    DEVICE_CALL(cuMemRelease, handle);
    return result;
}
