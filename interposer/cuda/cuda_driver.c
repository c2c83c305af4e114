/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks of the CUDA driver's memory functions. Programs that are linked with libcuda.so.1 call
 * them. Programs that ask CUDA's resolvers, such as PyTorch's expandable segments, get pointers to
 * them from cuda_entry_points.c. A program that gets its functions from libcuda.so.1 by dlsym
 * bypasses them.
 */

#include "cuda_driver.h"

static void device_memory(address_t address, size_t size) {
    record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_DEVICE, driver_device(), address, size, 0,
                      0);
}

HOOK(cuMemAlloc_v2)(address_t *address, size_t size) {
    DRIVER(cuMemAlloc_v2);
    int result = CUDA_CALL(real(address, size));
    if (RECORDED(result))
        device_memory(*address, size);
    return result;
}

HOOK(cuMemAllocPitch_v2)(address_t *address, size_t *pitch, size_t width, size_t height,
                         unsigned element) {
    DRIVER(cuMemAllocPitch_v2);
    int result = CUDA_CALL(real(address, pitch, width, height, element));
    if (RECORDED(result))
        device_memory(*address, *pitch * height);
    return result;
}

HOOK(cuMemAllocManaged)(address_t *address, size_t size, unsigned flags) {
    DRIVER(cuMemAllocManaged);
    int result = CUDA_CALL(real(address, size, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_MANAGED, driver_device(), *address, size,
                          0, flags);
    return result;
}

HOOK(cuMemFree_v2)(address_t address) {
    DRIVER(cuMemFree_v2);
    return FREES_MEMORY(address, real(address));
}

static void pool_memory(address_t address, size_t size, void *stream) {
    int32_t device = stream_device(number(stream), driver_device());
    record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_POOL, device, address, size, number(stream),
                      0);
}

#define POOLED(suffix)                                                                             \
    HOOK(cuMemAllocAsync##suffix)(address_t * address, size_t size, void *stream) {                \
        DRIVER(cuMemAllocAsync##suffix);                                                           \
        int result = CUDA_CALL(real(address, size, stream));                                       \
        if (RECORDED(result))                                                                      \
            pool_memory(*address, size, stream);                                                   \
        return result;                                                                             \
    }                                                                                              \
    HOOK(cuMemAllocFromPoolAsync##suffix)(address_t * address, size_t size, void *pool,            \
                                          void *stream) {                                          \
        DRIVER(cuMemAllocFromPoolAsync##suffix);                                                   \
        int result = CUDA_CALL(real(address, size, pool, stream));                                 \
        if (RECORDED(result))                                                                      \
            pool_memory(*address, size, stream);                                                   \
        return result;                                                                             \
    }                                                                                              \
    HOOK(cuMemFreeAsync##suffix)(address_t address, void *stream) {                                \
        DRIVER(cuMemFreeAsync##suffix);                                                            \
        return FREES_MEMORY(address, real(address, stream));                                       \
    }
POOLED()
POOLED(_ptsz)

HOOK(cuMemPoolExportToShareableHandle)(void *handle, void *pool, int type, address_t flags) {
    DRIVER(cuMemPoolExportToShareableHandle);
    int result = CUDA_CALL(real(handle, pool, type, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_POOL, LIVESHIFT_MEMORY_EXPORTED, -1, number(pool), 0, 0,
                          (unsigned)type);
    return result;
}

HOOK(cuMemPoolImportFromShareableHandle)(void **pool, void *handle, int type, address_t flags) {
    DRIVER(cuMemPoolImportFromShareableHandle);
    int result = CUDA_CALL(real(pool, handle, type, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_POOL, LIVESHIFT_MEMORY_IMPORTED, -1, number(*pool), 0, 0,
                          (unsigned)type);
    return result;
}

HOOK(cuMemPoolDestroy)(void *pool) {
    DRIVER(cuMemPoolDestroy);
    return FREES(LEDGER_POOL, number(pool), real(pool));
}

static void pinned_memory(void *pointer, size_t size, unsigned flags) {
    record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_PINNED, driver_device(), number(pointer),
                      size, 0, flags);
}

HOOK(cuMemAllocHost_v2)(void **pointer, size_t size) {
    DRIVER(cuMemAllocHost_v2);
    int result = CUDA_CALL(real(pointer, size));
    if (RECORDED(result))
        pinned_memory(*pointer, size, 0);
    return result;
}

HOOK(cuMemHostAlloc)(void **pointer, size_t size, unsigned flags) {
    DRIVER(cuMemHostAlloc);
    int result = CUDA_CALL(real(pointer, size, flags));
    if (RECORDED(result))
        pinned_memory(*pointer, size, flags);
    return result;
}

HOOK(cuMemFreeHost)(void *pointer) {
    DRIVER(cuMemFreeHost);
    return FREES(LEDGER_POINTER, number(pointer), real(pointer));
}

HOOK(cuMemHostRegister_v2)(void *pointer, size_t size, unsigned flags) {
    DRIVER(cuMemHostRegister_v2);
    int result = CUDA_CALL(real(pointer, size, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_REGISTERED, LIVESHIFT_MEMORY_REGISTERED, driver_device(),
                          number(pointer), size, 0, flags);
    return result;
}

HOOK(cuMemHostUnregister)(void *pointer) {
    DRIVER(cuMemHostUnregister);
    return FREES(LEDGER_REGISTERED, number(pointer), real(pointer));
}

HOOK(cuIpcGetMemHandle)(struct ipc_handle *handle, address_t address) {
    DRIVER(cuIpcGetMemHandle);
    int result = CUDA_CALL(real(handle, address));
    if (RECORDED(result))
        exported_memory(address);
    else if (cuda_depth == 0)
        arena_ipc_refused(address);
    return result;
}

HOOK(cuIpcOpenMemHandle_v2)(address_t *address, struct ipc_handle handle, unsigned flags) {
    DRIVER(cuIpcOpenMemHandle_v2);
    int result = CUDA_CALL(real(address, handle, flags));
    if (RECORDED(result))
        opened_memory(*address, driver_device(), flags);
    return result;
}

HOOK(cuIpcCloseMemHandle)(address_t address) {
    DRIVER(cuIpcCloseMemHandle);
    return FREES(LEDGER_OPENED, address, real(address));
}

HOOK(cuMemAddressReserve)(address_t *address, size_t size, size_t alignment, address_t hint,
                          address_t flags) {
    DRIVER(cuMemAddressReserve);
    int result = CUDA_CALL(real(address, size, alignment, hint, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_RESERVED, LIVESHIFT_MEMORY_RESERVED, -1, *address, size, 0, flags);
    return result;
}

HOOK(cuMemAddressFree)(address_t address, size_t size) {
    DRIVER(cuMemAddressFree);
    return FREES(LEDGER_RESERVED, address, real(address, size));
}

HOOK(cuMemCreate)(handle_t *handle, size_t size, const struct allocation_properties *properties,
                  address_t flags) {
    DRIVER(cuMemCreate);
    int result = CUDA_CALL(real(handle, size, properties, flags));
    if (RECORDED(result))
        record_handle(LIVESHIFT_MEMORY_PHYSICAL,
                      properties->location.type == LOCATION_DEVICE ? properties->location.id : -1,
                      *handle, size, (unsigned)properties->handle_types);
    return result;
}

HOOK(cuMemRelease)(handle_t handle) {
    DRIVER(cuMemRelease);
    return FREES(LEDGER_HANDLE, handle, real(handle));
}

/* cuMemUnmap's hook may change the ledger after the real call: the addresses belong to the
   application until cuMemAddressFree. Other allocations can get a freed address before the call
   that frees it is back. */
HOOK(cuMemMap)(address_t address, size_t size, size_t offset, handle_t handle, address_t flags) {
    DRIVER(cuMemMap);
    int result = CUDA_CALL(real(address, size, offset, handle, flags));
    if (RECORDED(result)) {
        service_for_memory();
        ledger_mapped(address, size, handle, flags);
    }
    return result;
}

HOOK(cuMemUnmap)(address_t address, size_t size) {
    DRIVER(cuMemUnmap);
    int result = CUDA_CALL(real(address, size));
    if (RECORDED(result))
        ledger_unmapped(address, size);
    return result;
}

HOOK(cuMemRetainAllocationHandle)(handle_t *handle, void *address) {
    DRIVER(cuMemRetainAllocationHandle);
    int result = CUDA_CALL(real(handle, address));
    if (RECORDED(result))
        ledger_retained(*handle);
    return result;
}

HOOK(cuMemExportToShareableHandle)(void *shareable, handle_t handle, int type, address_t flags) {
    DRIVER(cuMemExportToShareableHandle);
    int result = CUDA_CALL(real(shareable, handle, type, flags));
    if (RECORDED(result))
        ledger_exported(LEDGER_HANDLE, handle, (unsigned)type);
    return result;
}

HOOK(cuMemImportFromShareableHandle)(handle_t *handle, void *shareable, int type) {
    DRIVER(cuMemImportFromShareableHandle);
    int result = CUDA_CALL(real(handle, shareable, type));
    if (RECORDED(result))
        record_handle(LIVESHIFT_MEMORY_IMPORTED, driver_device(), *handle, 0, (unsigned)type);
    return result;
}

HOOK(cuMulticastCreate)(handle_t *handle, const void *properties) {
    DRIVER(cuMulticastCreate);
    int result = CUDA_CALL(real(handle, properties));
    if (RECORDED(result)) /* CUmulticastObjectProp begins with numDevices and size */
        record_handle(LIVESHIFT_MEMORY_MULTICAST, -1, *handle, ((const size_t *)properties)[1], 0);
    return result;
}

HOOK(cuDevicePrimaryCtxReset_v2)(int device) {
    DRIVER(cuDevicePrimaryCtxReset_v2);
    int result = CUDA_CALL(real(device));
    if (RECORDED(result) && atomic_load(&process_gate) != NULL)
        device_was_reset(device);
    return result;
}

/* The last release of a primary context ends it. */
HOOK(cuDevicePrimaryCtxRelease_v2)(int device) {
    DRIVER(cuDevicePrimaryCtxRelease_v2);
    int result = CUDA_CALL(real(device));
    if (RECORDED(result) && arena_is_stale(device))
        device_was_reset(device);
    return result;
}

HOOK(cuCtxEnablePeerAccess)(void *context, unsigned flags) {
    DRIVER(cuCtxEnablePeerAccess);
    int result = CUDA_CALL(real(context, flags));
    if (RECORDED(result) || RECORDED(result - CUDA_PEER_ALREADY))
        arena_peer(driver_device(), arena_device_of(context), true);
    return result;
}

HOOK(cuCtxDisablePeerAccess)(void *context) {
    DRIVER(cuCtxDisablePeerAccess);
    int result = CUDA_CALL(real(context));
    if (RECORDED(result))
        arena_peer(driver_device(), arena_device_of(context), false);
    return result;
}
