/* SPDX-License-Identifier: Apache-2.0 */
/* Pinned host memory. */
#include "blocks.h"
#include "context.h"
#include "gate.h"

#include <string.h>
#include <sys/mman.h>

CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    API_CALL();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (pointer == NULL || bytes == 0 || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    void *base =
        mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&blocks_lock);
    block_add((struct block){.base = (uintptr_t)base,
                             .size = bytes,
                             .kind = BLOCK_HOST,
                             .device = context->device,
                             .flags = flags,
                             .shared = -1});
    pthread_mutex_unlock(&blocks_lock);
    *pointer = base;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocHost_v2(void **pointer, size_t bytes) {
    return cuMemHostAlloc(pointer, bytes, 0);
}

CUresult cuMemFreeHost(void *pointer) {
    API_CALL();
    return block_free((uintptr_t)pointer, BLOCK_HOST, BLOCK_HOST);
}

CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags) {
    API_CALL();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (pointer == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    uintptr_t base = (uintptr_t)pointer;
    size_t count;
    struct block *all = blocks_all(&count);
    for (size_t i = 0; i < count; i++)
        if (all[i].base < base + bytes && base < all[i].base + all[i].size)
            result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (result == CUDA_SUCCESS)
        block_add((struct block){.base = base,
                                 .size = bytes,
                                 .kind = BLOCK_REGISTERED,
                                 .device = context->device,
                                 .flags = flags,
                                 .shared = -1});
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuMemHostUnregister(void *pointer) {
    API_CALL();
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    bool found = block && block->base == (uintptr_t)pointer && block->kind == BLOCK_REGISTERED;
    if (found)
        block_remove(block);
    pthread_mutex_unlock(&blocks_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

static CUresult flags_of(void *pointer, unsigned int *flags) {
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    bool found = block && (block->kind == BLOCK_HOST || block->kind == BLOCK_REGISTERED);
    if (found && flags != NULL)
        *flags = block->flags;
    pthread_mutex_unlock(&blocks_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned int flags) {
    API_CALL();
    if (device == NULL || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = flags_of(host, NULL);
    *device = result == CUDA_SUCCESS ? (CUdeviceptr)(uintptr_t)host : 0;
    return result;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *pointer) {
    API_CALL();
    return flags == NULL ? CUDA_ERROR_INVALID_VALUE : flags_of(pointer, flags);
}
