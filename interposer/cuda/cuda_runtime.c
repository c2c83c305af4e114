/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks of the CUDA runtime's memory functions, for PyTorch and other users of libcudart.so.
 * libc10_cuda and libtorch_cuda are linked with it dynamically, so they call the preloaded
 * definitions. (Their references are versioned, `cudaMalloc@libcudart.so.13`; glibc accepts an
 * unversioned definition for any version.) Libraries that are linked with libcudart_static, such as
 * NCCL and cuBLAS, bypass the hooks: their copies of these functions are hidden.
 */

#include "cuda_hooks.h"

struct extent {
    size_t width, height, depth;
};

struct pitched_pointer {
    void *pointer;
    size_t pitch, xsize, ysize;
};

EXPORTED int cudaMalloc(void **pointer, size_t size) {
    RUNTIME(cudaMalloc);
    struct arena_allocation block;
    if (cuda_depth == 0 && pointer != NULL && arena_allocate(size, &block)) {
        *pointer = (void *)(uintptr_t)block.address;
        record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_ARENA, block.device, block.address,
                          block.size, 0, 0);
        return 0;
    }
    return RECORDS(real(pointer, size), record_memory(LIVESHIFT_MEMORY_DEVICE, runtime_device(),
                                                      number(*pointer), size, 0));
}

RUNTIME_HOOK(cudaMallocPitch, (void **pointer, size_t *pitch, size_t width, size_t height),
             RECORDS(real(pointer, pitch, width, height),
                     record_memory(LIVESHIFT_MEMORY_DEVICE, runtime_device(), number(*pointer),
                                   pitch[0] * height, 0)))

EXPORTED int cudaMalloc3D(struct pitched_pointer *pitched, struct extent extent) {
    RUNTIME(cudaMalloc3D);
    return RECORDS(real(pitched, extent),
                   record_memory(LIVESHIFT_MEMORY_DEVICE, runtime_device(),
                                 number(pitched->pointer),
                                 pitched->pitch * extent.height * extent.depth, 0));
}

RUNTIME_HOOK(cudaMallocManaged, (void **pointer, size_t size, unsigned flags),
             RECORDS(real(pointer, size, flags),
                     record_memory(LIVESHIFT_MEMORY_MANAGED, runtime_device(), number(*pointer),
                                   size, flags)))

RUNTIME_HOOK(cudaFree, (void *pointer), FREES_MEMORY(number(pointer), real(pointer)))

/* Functions that take a stream have a variant for a default stream per thread. */
#define POOLED(suffix)                                                                             \
    RUNTIME_HOOK(cudaMallocAsync##suffix, (void **pointer, size_t size, void *stream),             \
                 RECORDS(real(pointer, size, stream),                                              \
                         record_pool_memory(runtime_device(), number(*pointer), size, stream)))    \
    RUNTIME_HOOK(cudaMallocFromPoolAsync##suffix,                                                  \
                 (void **pointer, size_t size, void *pool, void *stream),                          \
                 RECORDS(real(pointer, size, pool, stream),                                        \
                         record_pool_memory(runtime_device(), number(*pointer), size, stream)))    \
    RUNTIME_HOOK(cudaFreeAsync##suffix, (void *pointer, void *stream),                             \
                 FREES_MEMORY(number(pointer), real(pointer, stream)))
POOLED()
POOLED(_ptsz)

RUNTIME_HOOK(cudaHostAlloc, (void **pointer, size_t size, unsigned flags),
             RECORDS(real(pointer, size, flags),
                     record_memory(LIVESHIFT_MEMORY_PINNED, runtime_device(), number(*pointer),
                                   size, flags)))

RUNTIME_HOOK(cudaMallocHost, (void **pointer, size_t size),
             RECORDS(real(pointer, size), record_memory(LIVESHIFT_MEMORY_PINNED, runtime_device(),
                                                        number(*pointer), size, 0)))

RUNTIME_HOOK(cudaFreeHost, (void *pointer), FREES(LEDGER_POINTER, number(pointer), real(pointer)))

RUNTIME_HOOK(cudaHostRegister, (void *pointer, size_t size, unsigned flags),
             RECORDS(real(pointer, size, flags),
                     record_registered(runtime_device(), pointer, size, flags)))

RUNTIME_HOOK(cudaHostUnregister, (void *pointer),
             FREES(LEDGER_REGISTERED, number(pointer), real(pointer)))

EXPORTED int cudaIpcGetMemHandle(struct ipc_handle *handle, void *pointer) {
    RUNTIME(cudaIpcGetMemHandle);
    int result = CUDA_CALL(real(handle, pointer));
    if (RECORDED(result))
        exported_memory(number(pointer));
    else if (cuda_depth == 0)
        arena_ipc_refused(number(pointer));
    return result;
}

RUNTIME_HOOK(cudaIpcOpenMemHandle, (void **pointer, struct ipc_handle handle, unsigned flags),
             RECORDS(real(pointer, handle, flags),
                     opened_memory(number(*pointer), runtime_device(), flags)))

RUNTIME_HOOK(cudaIpcCloseMemHandle, (void *pointer),
             FREES(LEDGER_OPENED, number(pointer), real(pointer)))

RUNTIME_HOOK(cudaMemPoolExportToShareableHandle,
             (void *handle, void *pool, int type, unsigned flags),
             RECORDS(real(handle, pool, type, flags),
                     record_shared_pool(LIVESHIFT_MEMORY_EXPORTED, pool, type)))

RUNTIME_HOOK(cudaMemPoolImportFromShareableHandle,
             (void **pool, void *handle, int type, unsigned flags),
             RECORDS(real(pool, handle, type, flags),
                     record_shared_pool(LIVESHIFT_MEMORY_IMPORTED, *pool, type)))

RUNTIME_HOOK(cudaMemPoolDestroy, (void *pool), FREES(LEDGER_POOL, number(pool), real(pool)))

EXPORTED int cudaDeviceReset(void) {
    RUNTIME(cudaDeviceReset);
    int32_t device = runtime_device();
    return RECORDS(real(), device_was_reset(device));
}

/* The current device may then access the peer's memory, but not the other way round. */
EXPORTED int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    RUNTIME(cudaDeviceEnablePeerAccess);
    int result = CUDA_CALL(real(peer, flags));
    if (RECORDED(result) || RECORDED(result - CUDA_PEER_ALREADY))
        arena_peer(runtime_device(), peer, true);
    return result;
}

RUNTIME_HOOK(cudaDeviceDisablePeerAccess, (int peer),
             RECORDS(real(peer), arena_peer(runtime_device(), peer, false)))
