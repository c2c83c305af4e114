/* SPDX-License-Identifier: Apache-2.0 */
/* Stream-ordered allocation. Memory is there at once and goes when the stream comes to the free. */
#include "blocks.h"
#include "context.h"
#include "device.h"
#include "gate.h"
#include "stream.h"

#include <stdlib.h>

struct CUmemPoolHandle_st {
    CUdevice device;
    uint64_t used, used_high, threshold;
    int reuse[3];
};

static struct CUmemPoolHandle_st defaults[MAX_DEVICES];
/* NULL: the default one. */
static CUmemoryPool chosen[MAX_DEVICES];

static CUmemoryPool default_pool(CUdevice device) {
    defaults[device].device = device;
    return &defaults[device];
}

static CUmemoryPool pool_of(CUdevice device) {
    return chosen[device] ? chosen[device] : default_pool(device);
}

static bool captures(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuStreamIsCapturing(stream, &status);
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    if (pointer == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    /* Allocation nodes of graphs aren't simulated. */
    if (captures(stream))
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = stream_submit(stream, (struct work){0});
    if (result == CUDA_SUCCESS)
        result = block_allocate(BLOCK_POOL, pool->device, bytes, pool, pointer);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&blocks_lock);
    pool->used += bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    pthread_mutex_unlock(&blocks_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    API_CALL();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&blocks_lock);
    CUmemoryPool pool = pool_of(context->device);
    pthread_mutex_unlock(&blocks_lock);
    return allocate(pointer, bytes, pool, stream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                                 CUstream stream) {
    API_CALL();
    return pool == NULL ? CUDA_ERROR_INVALID_VALUE : allocate(pointer, bytes, pool, stream);
}

static void free_now(void *argument) {
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)argument);
    if (block != NULL && block->kind == BLOCK_POOL)
        block->pool->used -= block->size;
    pthread_mutex_unlock(&blocks_lock);
    block_free((uintptr_t)argument, BLOCK_POOL, BLOCK_DEVICE);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    API_CALL();
    if (captures(stream))
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    bool found = block && block->base == pointer &&
                 (block->kind == BLOCK_POOL || block->kind == BLOCK_DEVICE);
    pthread_mutex_unlock(&blocks_lock);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    return stream_submit(stream, (struct work){free_now, (void *)(uintptr_t)pointer, NULL,
                                               CU_GRAPH_NODE_TYPE_MEM_FREE});
}

#define CHECK_DEVICE(pool, device)                                                                 \
    API_CALL();                                                                                    \
    if ((pool) == NULL)                                                                            \
        return CUDA_ERROR_INVALID_VALUE;                                                           \
    if (!device_valid(device))                                                                     \
    return CUDA_ERROR_INVALID_DEVICE

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    CHECK_DEVICE(pool, device);
    pthread_mutex_lock(&blocks_lock);
    *pool = default_pool(device);
    pthread_mutex_unlock(&blocks_lock);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    CHECK_DEVICE(pool, device);
    pthread_mutex_lock(&blocks_lock);
    *pool = pool_of(device);
    pthread_mutex_unlock(&blocks_lock);
    return CUDA_SUCCESS;
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    CHECK_DEVICE(pool, device);
    if (pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    chosen[device] = pool;
    pthread_mutex_unlock(&blocks_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    API_CALL();
    if (pool == NULL || properties == NULL ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        !device_valid(properties->location.id))
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_NOT_SUPPORTED;
    *pool = calloc(1, sizeof **pool);
    (*pool)->device = properties->location.id;
    return CUDA_SUCCESS;
}

/* The memory that is still allocated from it keeps it alive in CUDA; here it stays for ever. */
CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    API_CALL();
    if (pool == NULL || (pool >= defaults && pool < defaults + MAX_DEVICES))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    bool used = pool->used > 0;
    if (chosen[pool->device] == pool)
        chosen[pool->device] = NULL;
    pthread_mutex_unlock(&blocks_lock);
    if (!used)
        free(pool);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    API_CALL();
    CUresult result = CUDA_SUCCESS;
    if (pool == NULL || value == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = pool->reuse[attribute - 1];
        break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(uint64_t *)value = pool->threshold;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *(uint64_t *)value = pool->used;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *(uint64_t *)value = pool->used_high;
        break;
    default:
        result = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    API_CALL();
    CUresult result = CUDA_SUCCESS;
    if (pool == NULL || value == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        pool->reuse[attribute - 1] = *(int *)value;
        break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->threshold = *(uint64_t *)value;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        pool->used_high = pool->used;
        break;
    default:
        result = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count) {
    API_CALL();
    for (size_t i = 0; i < count; i++)
        if (pool == NULL || !device_valid(access[i].location.id))
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    API_CALL();
    (void)keep;
    return pool == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
