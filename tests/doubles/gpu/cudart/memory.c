/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#include <string.h>

static CUdeviceptr device(const void *pointer) { return (CUdeviceptr)(uintptr_t)pointer; }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { FORWARD(cuMemGetInfo(free, total)); }

/* Of nothing the runtime makes nothing, where the driver sees an error. */
cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    if (pointer != NULL && bytes == 0) {
        *pointer = NULL;
        return cudaSuccess;
    }
    FORWARD(cuMemAlloc((CUdeviceptr *)pointer, bytes));
}

cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
    FORWARD(cuMemAllocPitch((CUdeviceptr *)pointer, pitch, width, height, 4));
}
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned int flags) {
    FORWARD(cuMemAllocManaged((CUdeviceptr *)pointer, bytes, flags));
}
cudaError_t cudaFree(void *pointer) { FORWARD(cuMemFree(device(pointer))); }

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    FORWARD(cuMemHostAlloc(pointer, bytes, flags));
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    FORWARD(cuMemHostAlloc(pointer, bytes, 0));
}
cudaError_t cudaFreeHost(void *pointer) {
    if (pointer == NULL)
        return cudaSuccess;
    FORWARD(cuMemFreeHost(pointer));
}
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags) {
    FORWARD(cuMemHostRegister(pointer, bytes, flags));
}
cudaError_t cudaHostUnregister(void *pointer) { FORWARD(cuMemHostUnregister(pointer)); }
cudaError_t cudaHostGetDevicePointer(void **pointer, void *host, unsigned int flags) {
    FORWARD(cuMemHostGetDevicePointer((CUdeviceptr *)pointer, host, flags));
}
cudaError_t cudaHostGetFlags(unsigned int *flags, void *host) {
    FORWARD(cuMemHostGetFlags(flags, host));
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                     const void *pointer) {
    unsigned int type = 0, managed = 0;
    int ordinal = 0;
    CUdeviceptr on_device = 0, on_host = 0;
    CUpointer_attribute wanted[] = {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        CU_POINTER_ATTRIBUTE_HOST_POINTER};
    void *values[] = {&type, &managed, &ordinal, &on_device, &on_host};
    cudaError_t error = driver_ready();
    if (error == cudaSuccess && attributes == NULL)
        error = cudaErrorInvalidValue;
    if (error == cudaSuccess)
        error = (cudaError_t)driver.cuPointerGetAttributes(5, wanted, values, device(pointer));
    if (error != cudaSuccess)
        return noted(error);
    /* CUDA 12's structure ends before `reserved`. */
    memset(attributes, 0,
           CUDART_MAJOR == 13 ? sizeof *attributes
                              : offsetof(struct cudaPointerAttributes, reserved));
    attributes->type = managed                        ? cudaMemoryTypeManaged
                       : type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice
                       : type == CU_MEMORYTYPE_HOST   ? cudaMemoryTypeHost
                                                      : cudaMemoryTypeUnregistered;
    attributes->device = ordinal;
    attributes->devicePointer = (void *)(uintptr_t)on_device;
    attributes->hostPointer = type == 0 ? (void *)pointer : (void *)(uintptr_t)on_host;
    return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    FORWARD(cuIpcGetMemHandle(handle, device(pointer)));
}
cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags) {
    FORWARD(cuIpcOpenMemHandle((CUdeviceptr *)pointer, handle, flags));
}
cudaError_t cudaIpcCloseMemHandle(void *pointer) { FORWARD(cuIpcCloseMemHandle(device(pointer))); }

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    FORWARD(cuMemAllocAsync((CUdeviceptr *)pointer, bytes, stream));
}
cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream) {
    FORWARD(cuMemAllocFromPoolAsync((CUdeviceptr *)pointer, bytes, pool, stream));
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    FORWARD(cuMemFreeAsync(device(pointer), stream));
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    FORWARD_BARE(cuDeviceGetDefaultMemPool(pool, device));
}
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device) {
    FORWARD_BARE(cuDeviceGetMemPool(pool, device));
}
cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool) {
    FORWARD_BARE(cuDeviceSetMemPool(device, pool));
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
    FORWARD_BARE(cuMemPoolCreate(pool, (const CUmemPoolProps *)properties));
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { FORWARD_BARE(cuMemPoolDestroy(pool)); }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute,
                                    void *value) {
    FORWARD_BARE(cuMemPoolGetAttribute(pool, (CUmemPool_attribute)attribute, value));
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute,
                                    void *value) {
    FORWARD_BARE(cuMemPoolSetAttribute(pool, (CUmemPool_attribute)attribute, value));
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access,
                                 size_t count) {
    FORWARD_BARE(cuMemPoolSetAccess(pool, (const CUmemAccessDesc *)access, count));
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) {
    FORWARD_BARE(cuMemPoolTrimTo(pool, keep));
}

/* The driver has one function for each direction, and the runtime calls it: that is what something
   between the two will see. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    if (bytes == 0)
        return cudaSuccess;
    switch (kind) {
    case cudaMemcpyHostToDevice:
        FORWARD(cuMemcpyHtoD(device(to), from, bytes));
    case cudaMemcpyDeviceToHost:
        FORWARD(cuMemcpyDtoH(to, device(from), bytes));
    case cudaMemcpyDeviceToDevice:
        FORWARD(cuMemcpyDtoD(device(to), device(from), bytes));
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        FORWARD(cuMemcpy(device(to), device(from), bytes));
    }
    return noted(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    if (bytes == 0)
        return cudaSuccess;
    switch (kind) {
    case cudaMemcpyHostToDevice:
        FORWARD(cuMemcpyHtoDAsync(device(to), from, bytes, stream));
    case cudaMemcpyDeviceToHost:
        FORWARD(cuMemcpyDtoHAsync(to, device(from), bytes, stream));
    case cudaMemcpyDeviceToDevice:
        FORWARD(cuMemcpyDtoDAsync(device(to), device(from), bytes, stream));
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        FORWARD(cuMemcpyAsync(device(to), device(from), bytes, stream));
    }
    return noted(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyPeer(void *to, int toDevice, const void *from, int fromDevice, size_t bytes) {
    (void)toDevice;
    (void)fromDevice;
    FORWARD(cuMemcpy(device(to), device(from), bytes));
}
cudaError_t cudaMemcpyPeerAsync(void *to, int toDevice, const void *from, int fromDevice,
                                size_t bytes, cudaStream_t stream) {
    (void)toDevice;
    (void)fromDevice;
    FORWARD(cuMemcpyAsync(device(to), device(from), bytes, stream));
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    FORWARD(cuMemsetD8(device(to), (unsigned char)value, bytes));
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    FORWARD(cuMemsetD8Async(device(to), (unsigned char)value, bytes, stream));
}
