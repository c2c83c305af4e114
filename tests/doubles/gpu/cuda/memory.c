/* SPDX-License-Identifier: Apache-2.0 */
/* cuMemAlloc and its like, and what a pointer is. */
#include "blocks.h"
#include "capture.h"
#include "context.h"
#include "gate.h"
#include "stream.h"

#include <string.h>

/* As the real one refuses what would make the capturing program wait (global mode). */
static CUresult refuse_in_capture(CUcontext context) {
    pthread_mutex_lock(&streams_lock);
    CUstream capturing = stream_capturing(context);
    if (capturing != NULL)
        capture_invalidate(capturing->capture);
    pthread_mutex_unlock(&streams_lock);
    return capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, enum block_kind kind) {
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (pointer == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = refuse_in_capture(context);
    if (result != CUDA_SUCCESS)
        return result;
    return block_allocate(kind, context->device, bytes, NULL, pointer);
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    API_CALL();
    return allocate(pointer, bytes, BLOCK_DEVICE);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                            unsigned int element) {
    API_CALL();
    if (pitch == NULL || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = (width + 511) / 512 * 512;
    return allocate(pointer, *pitch * height, BLOCK_DEVICE);
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    API_CALL();
    if (flags != 1 && flags != 2)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(pointer, bytes, BLOCK_MANAGED);
}

/* Waits for all work of the context first, as the real one does. */
CUresult cuMemFree_v2(CUdeviceptr pointer) {
    API_CALL();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS || pointer == 0)
        return result;
    result = refuse_in_capture(context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    bool pool = block != NULL && block->kind == BLOCK_POOL;
    pthread_mutex_unlock(&blocks_lock);
    streams_drain(context, NULL);
    if (pool)
        return block_free((uintptr_t)pointer, BLOCK_POOL, BLOCK_POOL);
    return block_free((uintptr_t)pointer, BLOCK_DEVICE, BLOCK_MANAGED);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    API_CALL();
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    if (block != NULL && base != NULL)
        *base = block->base;
    if (block != NULL && size != NULL)
        *size = block->size;
    pthread_mutex_unlock(&blocks_lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static bool on_host(const struct block *block) {
    return block->kind == BLOCK_HOST || block->kind == BLOCK_REGISTERED;
}

static CUresult describe(const struct block *block, CUpointer_attribute attribute,
                         CUdeviceptr pointer, void *data) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = context_of(block->device);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)data = on_host(block) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = pointer;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)data = on_host(block) || block->kind == BLOCK_MANAGED ? pointer : 0;
        return *(CUdeviceptr *)data ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(unsigned int *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)data = block->id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned int *)data = block->kind == BLOCK_MANAGED;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = block->device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned int *)data = block->kind == BLOCK_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = block->base;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = block->size;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned int *)data = 1;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    API_CALL();
    if (data == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    CUresult result = block ? describe(block, attribute, pointer, data) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

/* Unlike the one above it succeeds for a pointer that CUDA doesn't know: all values are then 0. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                CUdeviceptr pointer) {
    API_CALL();
    if (attributes == NULL || data == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < count; i++) {
        bool narrow = attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_MAPPED;
        memset(data[i], 0, narrow ? sizeof(int) : sizeof(CUdeviceptr));
        if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)data[i] = CU_DEVICE_INVALID;
        cuPointerGetAttribute(data[i], attributes[i], pointer);
    }
    return CUDA_SUCCESS;
}
