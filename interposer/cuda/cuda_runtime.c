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

static void device_memory(void *pointer, size_t size) {
    record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_DEVICE, runtime_device(), number(pointer),
                      size, 0, 0);
}

static void pinned_memory(void *pointer, size_t size, unsigned flags) {
    record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_PINNED, runtime_device(), number(pointer),
                      size, 0, flags);
}

static void pool_memory(void *pointer, size_t size, void *stream) {
    int32_t device = stream_device(number(stream), runtime_device());
    record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_POOL, device, number(pointer), size,
                      number(stream), 0);
}

EXPORTED int cudaMalloc(void **pointer, size_t size) {
    RUNTIME(cudaMalloc);
    struct arena_allocation block;
    if (cuda_depth == 0 && pointer != NULL && arena_allocate(size, &block)) {
        *pointer = (void *)(uintptr_t)block.address;
        record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_ARENA, block.device, block.address,
                          block.size, 0, 0);
        return 0;
    }
    int result = CUDA_CALL(real(pointer, size));
    if (RECORDED(result) && *pointer != NULL)
        device_memory(*pointer, size);
    return result;
}

EXPORTED int cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
    RUNTIME(cudaMallocPitch);
    int result = CUDA_CALL(real(pointer, pitch, width, height));
    if (RECORDED(result) && *pointer != NULL)
        device_memory(*pointer, *pitch * height);
    return result;
}

EXPORTED int cudaMalloc3D(struct pitched_pointer *pitched, struct extent extent) {
    RUNTIME(cudaMalloc3D);
    int result = CUDA_CALL(real(pitched, extent));
    if (RECORDED(result) && pitched->pointer != NULL)
        device_memory(pitched->pointer, pitched->pitch * extent.height * extent.depth);
    return result;
}

EXPORTED int cudaMallocManaged(void **pointer, size_t size, unsigned flags) {
    RUNTIME(cudaMallocManaged);
    int result = CUDA_CALL(real(pointer, size, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_MANAGED, runtime_device(),
                          number(*pointer), size, 0, flags);
    return result;
}

EXPORTED int cudaFree(void *pointer) {
    RUNTIME(cudaFree);
    return FREES_MEMORY(number(pointer), real(pointer));
}

/* Functions that take a stream have a variant for a default stream per thread. */
#define POOLED(suffix)                                                                             \
    EXPORTED int cudaMallocAsync##suffix(void **pointer, size_t size, void *stream) {              \
        RUNTIME(cudaMallocAsync##suffix);                                                          \
        int result = CUDA_CALL(real(pointer, size, stream));                                       \
        if (RECORDED(result) && *pointer != NULL)                                                  \
            pool_memory(*pointer, size, stream);                                                   \
        return result;                                                                             \
    }                                                                                              \
    EXPORTED int cudaMallocFromPoolAsync##suffix(void **pointer, size_t size, void *pool,          \
                                                 void *stream) {                                   \
        RUNTIME(cudaMallocFromPoolAsync##suffix);                                                  \
        int result = CUDA_CALL(real(pointer, size, pool, stream));                                 \
        if (RECORDED(result) && *pointer != NULL)                                                  \
            pool_memory(*pointer, size, stream);                                                   \
        return result;                                                                             \
    }                                                                                              \
    EXPORTED int cudaFreeAsync##suffix(void *pointer, void *stream) {                              \
        RUNTIME(cudaFreeAsync##suffix);                                                            \
        return FREES_MEMORY(number(pointer), real(pointer, stream));                               \
    }
POOLED()
POOLED(_ptsz)

EXPORTED int cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    RUNTIME(cudaHostAlloc);
    int result = CUDA_CALL(real(pointer, size, flags));
    if (RECORDED(result) && *pointer != NULL)
        pinned_memory(*pointer, size, flags);
    return result;
}

EXPORTED int cudaMallocHost(void **pointer, size_t size) {
    RUNTIME(cudaMallocHost);
    int result = CUDA_CALL(real(pointer, size));
    if (RECORDED(result) && *pointer != NULL)
        pinned_memory(*pointer, size, 0);
    return result;
}

EXPORTED int cudaFreeHost(void *pointer) {
    RUNTIME(cudaFreeHost);
    return FREES(LEDGER_POINTER, number(pointer), real(pointer));
}

EXPORTED int cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    RUNTIME(cudaHostRegister);
    int result = CUDA_CALL(real(pointer, size, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_REGISTERED, LIVESHIFT_MEMORY_REGISTERED, runtime_device(),
                          number(pointer), size, 0, flags);
    return result;
}

EXPORTED int cudaHostUnregister(void *pointer) {
    RUNTIME(cudaHostUnregister);
    return FREES(LEDGER_REGISTERED, number(pointer), real(pointer));
}

EXPORTED int cudaIpcGetMemHandle(struct ipc_handle *handle, void *pointer) {
    RUNTIME(cudaIpcGetMemHandle);
    int result = CUDA_CALL(real(handle, pointer));
    if (RECORDED(result))
        exported_memory(number(pointer));
    else if (cuda_depth == 0)
        arena_ipc_refused(number(pointer));
    return result;
}

EXPORTED int cudaIpcOpenMemHandle(void **pointer, struct ipc_handle handle, unsigned flags) {
    RUNTIME(cudaIpcOpenMemHandle);
    int result = CUDA_CALL(real(pointer, handle, flags));
    if (RECORDED(result))
        opened_memory(number(*pointer), runtime_device(), flags);
    return result;
}

EXPORTED int cudaIpcCloseMemHandle(void *pointer) {
    RUNTIME(cudaIpcCloseMemHandle);
    return FREES(LEDGER_OPENED, number(pointer), real(pointer));
}

EXPORTED int cudaMemPoolExportToShareableHandle(void *handle, void *pool, int type,
                                                unsigned flags) {
    RUNTIME(cudaMemPoolExportToShareableHandle);
    int result = CUDA_CALL(real(handle, pool, type, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_POOL, LIVESHIFT_MEMORY_EXPORTED, -1, number(pool), 0, 0,
                          (unsigned)type);
    return result;
}

EXPORTED int cudaMemPoolImportFromShareableHandle(void **pool, void *handle, int type,
                                                  unsigned flags) {
    RUNTIME(cudaMemPoolImportFromShareableHandle);
    int result = CUDA_CALL(real(pool, handle, type, flags));
    if (RECORDED(result))
        record_allocation(LEDGER_POOL, LIVESHIFT_MEMORY_IMPORTED, -1, number(*pool), 0, 0,
                          (unsigned)type);
    return result;
}

EXPORTED int cudaMemPoolDestroy(void *pool) {
    RUNTIME(cudaMemPoolDestroy);
    return FREES(LEDGER_POOL, number(pool), real(pool));
}

EXPORTED int cudaDeviceReset(void) {
    RUNTIME(cudaDeviceReset);
    int32_t device = runtime_device();
    int result = CUDA_CALL(real());
    if (RECORDED(result) && atomic_load(&process_gate) != NULL)
        device_was_reset(device);
    return result;
}

/* The current device may then access the peer's memory, but not the other way round. */
EXPORTED int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    RUNTIME(cudaDeviceEnablePeerAccess);
    int result = CUDA_CALL(real(peer, flags));
    if (RECORDED(result) || RECORDED(result - CUDA_PEER_ALREADY))
        arena_peer(runtime_device(), peer, true);
    return result;
}

EXPORTED int cudaDeviceDisablePeerAccess(int peer) {
    RUNTIME(cudaDeviceDisablePeerAccess);
    int result = CUDA_CALL(real(peer));
    if (RECORDED(result))
        arena_peer(runtime_device(), peer, false);
    return result;
}
