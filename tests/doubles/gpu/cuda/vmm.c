/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses of the virtual memory management API, and maps of physical memory on them. */
#include "blocks.h"
#include "device.h"
#include "gate.h"
#include "handles.h"

#include <stdlib.h>
#include <sys/mman.h>

struct reservation {
    uintptr_t base;
    size_t size;
    struct reservation *next;
};

static struct reservation *reservations;

int protection(const CUmemAccess_flags access[static MAX_DEVICES]) {
    CUmemAccess_flags most = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    for (int i = 0; i < MAX_DEVICES; i++)
        if (access[i] > most)
            most = access[i];
    return most == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
           : most == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                      : PROT_NONE;
}

static bool reserved(uintptr_t base, size_t size) {
    for (struct reservation *r = reservations; r != NULL; r = r->next)
        if (base >= r->base && base - r->base <= r->size && size <= r->size - (base - r->base))
            return true;
    return false;
}

/* The first mapping that touches a range, or NULL. */
static struct block *mapping_in(uintptr_t base, size_t size) {
    size_t count;
    struct block *all = blocks_all(&count);
    for (size_t i = 0; i < count; i++)
        if (all[i].kind == BLOCK_MAPPED && all[i].base < base + size &&
            base < all[i].base + all[i].size)
            return &all[i];
    return NULL;
}

bool reservations_bare(void) {
    bool bare = false;
    pthread_mutex_lock(&blocks_lock);
    for (struct reservation *r = reservations; r != NULL && !bare; r = r->next)
        bare = mapping_in(r->base, r->size) == NULL;
    pthread_mutex_unlock(&blocks_lock);
    return bare;
}

/* Puts addresses back to being reserved only. */
static void only_reserve(uintptr_t base, size_t size) {
    mmap((void *)base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
}

/* ---- entry points ----------------------------------------------------------------------------- */

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    API_CALL();
    if (pointer == NULL || size == 0 || size % GRANULARITY != 0 || flags != 0 ||
        (alignment & (alignment - 1)) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *at = MAP_FAILED;
    if (hint != 0 && hint % alignment == 0)
        at = mmap((void *)(uintptr_t)hint, size, PROT_NONE, how | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == MAP_FAILED) {
        char *wide = mmap(NULL, size + alignment, PROT_NONE, how, -1, 0);
        if (wide == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
        size_t before = (alignment - (uintptr_t)wide % alignment) % alignment;
        if (before > 0)
            munmap(wide, before);
        if (alignment - before > 0)
            munmap(wide + before + size, alignment - before);
        at = wide + before;
    }
    struct reservation *reservation = malloc(sizeof *reservation);
    pthread_mutex_lock(&blocks_lock);
    *reservation = (struct reservation){(uintptr_t)at, size, reservations};
    reservations = reservation;
    pthread_mutex_unlock(&blocks_lock);
    *pointer = (CUdeviceptr)(uintptr_t)at;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    API_CALL();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    for (struct reservation **r = &reservations; *r != NULL; r = &(*r)->next)
        if ((*r)->base == pointer && (*r)->size == size && mapping_in(pointer, size) == NULL) {
            struct reservation *found = *r;
            *r = found->next;
            free(found);
            munmap((void *)(uintptr_t)pointer, size);
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                  CUmemGenericAllocationHandle number, unsigned long long flags) {
    API_CALL();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (size == 0 || size % GRANULARITY != 0 || offset != 0 || flags != 0)
        return result;
    pthread_mutex_lock(&blocks_lock);
    struct handle *handle = handle_find(number);
    if (handle != NULL && size <= handle->size && reserved(pointer, size) &&
        mapping_in(pointer, size) == NULL) {
        void *at = mremap(handle->home, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED,
                          (void *)(uintptr_t)pointer);
        result = at == MAP_FAILED ? CUDA_ERROR_MAP_FAILED : CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS) {
        mprotect((void *)(uintptr_t)pointer, size, PROT_NONE);
        handle->refs++;
        block_add((struct block){.base = (uintptr_t)pointer,
                                 .size = size,
                                 .kind = BLOCK_MAPPED,
                                 .device = handle->properties.location.id,
                                 .shared = -1,
                                 .handle = number});
    }
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

/* A range must cover whole mappings, and nothing but mappings; calls `each` for them. */
static CUresult over_mappings(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access,
                              void (*each)(struct block *, const CUmemAccessDesc *)) {
    uintptr_t at = (uintptr_t)pointer, end = at + size;
    if (size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (uintptr_t next = at; next < end;) {
        struct block *block = block_at(next);
        if (block == NULL || block->kind != BLOCK_MAPPED || block->base != next ||
            block->size > end - next)
            return CUDA_ERROR_INVALID_VALUE;
        next += block->size;
    }
    while (at < end) {
        struct block *block = block_at(at);
        at += block->size;
        each(block, access);
    }
    return CUDA_SUCCESS;
}

static void unmap(struct block *block, const CUmemAccessDesc *access) {
    (void)access;
    only_reserve(block->base, block->size);
    struct handle *handle = handle_find(block->handle);
    block_remove(block);
    handle_drop(handle);
}

static void set_access(struct block *block, const CUmemAccessDesc *access) {
    block->access[access->location.id] = access->flags;
    mprotect((void *)block->base, block->size, protection(block->access));
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    API_CALL();
    pthread_mutex_lock(&blocks_lock);
    CUresult result = over_mappings(pointer, size, NULL, unmap);
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access,
                        size_t count) {
    API_CALL();
    CUresult result = CUDA_SUCCESS;
    if (access == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            return CUDA_ERROR_NOT_SUPPORTED;
        if (!device_valid(access[i].location.id))
            return CUDA_ERROR_INVALID_DEVICE;
    }
    pthread_mutex_lock(&blocks_lock);
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = over_mappings(pointer, size, &access[i], set_access);
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                        CUdeviceptr pointer) {
    API_CALL();
    if (flags == NULL || location == NULL || !device_valid(location->id))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    bool found = block != NULL && block->kind == BLOCK_MAPPED;
    if (found)
        *flags = block->access[location->id];
    pthread_mutex_unlock(&blocks_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *number, void *address) {
    API_CALL();
    if (number == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)address);
    bool found = block != NULL && block->kind == BLOCK_MAPPED;
    if (found) {
        handle_find(block->handle)->refs++;
        *number = block->handle;
    }
    pthread_mutex_unlock(&blocks_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
