/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks of the CUDA driver's memory functions. Programs that are linked with libcuda.so.1 call
 * them. Programs that ask CUDA's resolvers, such as PyTorch's expandable segments, get pointers to
 * them from cuda_entry_points.c. A program that gets its functions from libcuda.so.1 by dlsym
 * bypasses them.
 */

#include "cuda_driver.h"

DRIVER_HOOK(cuMemAlloc_v2, (address_t *address, size_t size),
            RECORDS(real(address, size),
                    record_memory(LIVESHIFT_MEMORY_DEVICE, driver_device(), *address, size, 0)))

DRIVER_HOOK(cuMemAllocPitch_v2,
            (address_t *address, size_t *pitch, size_t width, size_t height, unsigned element),
            RECORDS(real(address, pitch, width, height, element),
                    record_memory(LIVESHIFT_MEMORY_DEVICE, driver_device(), *address,
                                  pitch[0] * height, 0)))

DRIVER_HOOK(cuMemAllocManaged, (address_t *address, size_t size, unsigned flags),
            RECORDS(real(address, size, flags),
                    record_memory(LIVESHIFT_MEMORY_MANAGED, driver_device(), *address, size,
                                  flags)))

DRIVER_HOOK(cuMemFree_v2, (address_t address), FREES_MEMORY(address, real(address)))

#define POOLED(suffix)                                                                             \
    DRIVER_HOOK(cuMemAllocAsync##suffix, (address_t *address, size_t size, void *stream),          \
                RECORDS(real(address, size, stream),                                               \
                        record_pool_memory(driver_device(), *address, size, stream)))              \
    DRIVER_HOOK(cuMemAllocFromPoolAsync##suffix,                                                   \
                (address_t *address, size_t size, void *pool, void *stream),                       \
                RECORDS(real(address, size, pool, stream),                                         \
                        record_pool_memory(driver_device(), *address, size, stream)))              \
    DRIVER_HOOK(cuMemFreeAsync##suffix, (address_t address, void *stream),                         \
                FREES_MEMORY(address, real(address, stream)))
POOLED()
POOLED(_ptsz)

DRIVER_HOOK(cuMemPoolExportToShareableHandle, (void *handle, void *pool, int type, address_t flags),
            RECORDS(real(handle, pool, type, flags),
                    record_shared_pool(LIVESHIFT_MEMORY_EXPORTED, pool, type)))

DRIVER_HOOK(cuMemPoolImportFromShareableHandle,
            (void **pool, void *handle, int type, address_t flags),
            RECORDS(real(pool, handle, type, flags),
                    record_shared_pool(LIVESHIFT_MEMORY_IMPORTED, *pool, type)))

DRIVER_HOOK(cuMemPoolDestroy, (void *pool), FREES(LEDGER_POOL, number(pool), real(pool)))

DRIVER_HOOK(cuMemAllocHost_v2, (void **pointer, size_t size),
            RECORDS(real(pointer, size), record_memory(LIVESHIFT_MEMORY_PINNED, driver_device(),
                                                       number(*pointer), size, 0)))

DRIVER_HOOK(cuMemHostAlloc, (void **pointer, size_t size, unsigned flags),
            RECORDS(real(pointer, size, flags),
                    record_memory(LIVESHIFT_MEMORY_PINNED, driver_device(), number(*pointer), size,
                                  flags)))

DRIVER_HOOK(cuMemFreeHost, (void *pointer), FREES(LEDGER_POINTER, number(pointer), real(pointer)))

DRIVER_HOOK(cuMemHostRegister_v2, (void *pointer, size_t size, unsigned flags),
            RECORDS(real(pointer, size, flags),
                    record_registered(driver_device(), pointer, size, flags)))

DRIVER_HOOK(cuMemHostUnregister, (void *pointer),
            FREES(LEDGER_REGISTERED, number(pointer), real(pointer)))

HOOK(cuIpcGetMemHandle)(struct ipc_handle *handle, address_t address) {
    DRIVER(cuIpcGetMemHandle);
    int result = CUDA_CALL(real(handle, address));
    if (RECORDED(result))
        exported_memory(address);
    else if (cuda_depth == 0)
        arena_ipc_refused(address);
    return result;
}

DRIVER_HOOK(cuIpcOpenMemHandle_v2, (address_t *address, struct ipc_handle handle, unsigned flags),
            RECORDS(real(address, handle, flags), opened_memory(*address, driver_device(), flags)))

DRIVER_HOOK(cuIpcCloseMemHandle, (address_t address), FREES(LEDGER_OPENED, address, real(address)))

DRIVER_HOOK(cuMemAddressReserve,
            (address_t *address, size_t size, size_t alignment, address_t hint, address_t flags),
            RECORDS(real(address, size, alignment, hint, flags),
                    record_allocation(LEDGER_RESERVED, LIVESHIFT_MEMORY_RESERVED, -1, *address,
                                      size, 0, flags)))

DRIVER_HOOK(cuMemAddressFree, (address_t address, size_t size),
            FREES(LEDGER_RESERVED, address, real(address, size)))

DRIVER_HOOK(
    cuMemCreate,
    (handle_t *handle, size_t size, const struct physical_properties *properties, address_t flags),
    RECORDS(real(handle, size, properties, flags),
            record_handle(LIVESHIFT_MEMORY_PHYSICAL,
                          properties->location.type == LOCATION_DEVICE ? properties->location.id
                                                                       : -1,
                          *handle, size, (unsigned)properties->handle_types)))

DRIVER_HOOK(cuMemRelease, (handle_t handle), FREES(LEDGER_HANDLE, handle, real(handle)))

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

DRIVER_HOOK(cuMemUnmap, (address_t address, size_t size),
            RECORDS(real(address, size), ledger_unmapped(address, size)))

DRIVER_HOOK(cuMemRetainAllocationHandle, (handle_t *handle, void *address),
            RECORDS(real(handle, address), ledger_retained(*handle)))

DRIVER_HOOK(cuMemExportToShareableHandle,
            (void *shareable, handle_t handle, int type, address_t flags),
            RECORDS(real(shareable, handle, type, flags),
                    ledger_exported(LEDGER_HANDLE, handle, (unsigned)type)))

DRIVER_HOOK(cuMemImportFromShareableHandle, (handle_t *handle, void *shareable, int type),
            RECORDS(real(handle, shareable, type),
                    record_handle(LIVESHIFT_MEMORY_IMPORTED, driver_device(), *handle, 0,
                                  (unsigned)type)))

/* CUmulticastObjectProp begins with numDevices and size. */
DRIVER_HOOK(cuMulticastCreate, (handle_t *handle, const void *properties),
            RECORDS(real(handle, properties), record_handle(LIVESHIFT_MEMORY_MULTICAST, -1, *handle,
                                                            ((const size_t *)properties)[1], 0)))

DRIVER_HOOK(cuDevicePrimaryCtxReset_v2, (int device),
            RECORDS(real(device), device_was_reset(device)))

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

DRIVER_HOOK(cuCtxDisablePeerAccess, (void *context),
            RECORDS(real(context), arena_peer(driver_device(), arena_device_of(context), false)))
