/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The virtual memory management API: addresses, physical memory, and maps of one on the other.
 *
 * Physical memory is a shared mapping ("home"), which mremap with an old size of 0 maps once more
 * wherever it is wanted: no descriptor needed. Only a handle that may be exported is a memfd.
 */
#include "blocks.h"
#include "content.h"
#include "context.h"
#include "device.h"
#include "gate.h"
#include "handles.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRANULARITY ((size_t)2 << 20)

struct handle {
    CUmemAllocationProp properties;
    size_t size;
    void *home;
    /* -1 unless it may be exported or was imported. */
    int memory;
    bool exported, imported;
    /* cuMemCreate and cuMemRetainAllocationHandle, and the maps. */
    unsigned int refs;
    void *saved;
    struct handle *next;
};

static struct handle *handles;

struct reservation {
    uintptr_t base;
    size_t size;
    struct reservation *next;
};

static struct reservation *reservations;

int protection(CUmemAccess_flags access) {
    return access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
           : access == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                        : PROT_NONE;
}

static struct handle *find_handle(CUmemGenericAllocationHandle number) {
    for (struct handle *h = handles; h != NULL; h = h->next)
        if ((uintptr_t)h == number)
            return h;
    return NULL;
}

bool handles_shared(void) {
    for (struct handle *h = handles; h != NULL; h = h->next)
        if (h->exported || h->imported)
            return true;
    return false;
}

bool handles_save(void) {
    for (struct handle *h = handles; h != NULL; h = h->next) {
        h->saved = pages_saved(h->home, h->size);
        if (h->saved == NULL)
            return false;
        madvise(h->home, h->size, MADV_REMOVE);
        mprotect(h->home, h->size, PROT_NONE);
    }
    return true;
}

void handles_bring_back(void) {
    for (struct handle *h = handles; h != NULL; h = h->next) {
        mprotect(h->home, h->size, PROT_READ | PROT_WRITE);
        pages_bring_back(h->home, h->saved, h->size);
        h->saved = NULL;
    }
}

static void drop(struct handle *handle) {
    if (--handle->refs > 0)
        return;
    for (struct handle **h = &handles; *h != NULL; h = &(*h)->next)
        if (*h == handle) {
            *h = handle->next;
            break;
        }
    munmap(handle->home, handle->size);
    if (handle->memory >= 0)
        close(handle->memory);
    /* Imported memory is counted where it was made. */
    if (!handle->imported)
        device_release(handle->properties.location.id, handle->size);
    free(handle);
}

/* With a home of its own or over the memory of a descriptor, which it then owns. */
static struct handle *make_handle(const CUmemAllocationProp *properties, size_t size, int memory) {
    void *home = mmap(NULL, size, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE | (memory < 0 ? MAP_ANONYMOUS : 0), memory, 0);
    if (home == MAP_FAILED)
        return NULL;
    struct handle *handle = calloc(1, sizeof *handle);
    *handle = (struct handle){*properties, size, home, memory, false, false, 1, NULL, handles};
    handles = handle;
    return handle;
}

static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (properties == NULL || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(properties->location.id))
        return CUDA_ERROR_INVALID_DEVICE;
    /* No fabric on this machine. */
    if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
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

/* Puts addresses back to being reserved only. */
static void only_reserve(uintptr_t base, size_t size) {
    mmap((void *)base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
}

/* ---- entry points ----------------------------------------------------------------------------- */

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    API_CALL();
    if (granularity == NULL || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return check_properties(properties);
}

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

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *properties, unsigned long long flags) {
    API_CALL();
    CUresult result = check_properties(properties);
    if (result != CUDA_SUCCESS)
        return result;
    if (handle == NULL || size == 0 || size % GRANULARITY != 0 || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = device_charge(properties->location.id, size);
    if (result != CUDA_SUCCESS)
        return result;
    int memory = -1;
    if (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        memory = memfd_create("liveshift simulated GPU", MFD_CLOEXEC);
        if (memory < 0 || ftruncate(memory, (off_t)size) != 0)
            result = CUDA_ERROR_OPERATING_SYSTEM;
    }
    pthread_mutex_lock(&blocks_lock);
    struct handle *made =
        result == CUDA_SUCCESS ? make_handle(properties, size, memory) : NULL;
    pthread_mutex_unlock(&blocks_lock);
    if (made == NULL) {
        if (memory >= 0)
            close(memory);
        device_release(properties->location.id, size);
        return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
    }
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle number) {
    API_CALL();
    pthread_mutex_lock(&blocks_lock);
    struct handle *handle = find_handle(number);
    if (handle != NULL)
        drop(handle);
    pthread_mutex_unlock(&blocks_lock);
    return handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                  CUmemGenericAllocationHandle number, unsigned long long flags) {
    API_CALL();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (size == 0 || size % GRANULARITY != 0 || offset != 0 || flags != 0)
        return result;
    pthread_mutex_lock(&blocks_lock);
    struct handle *handle = find_handle(number);
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
static CUresult over_mappings(CUdeviceptr pointer, size_t size, CUmemAccess_flags access,
                              void (*each)(struct block *, CUmemAccess_flags)) {
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

static void unmap(struct block *block, CUmemAccess_flags access) {
    (void)access;
    only_reserve(block->base, block->size);
    struct handle *handle = find_handle(block->handle);
    block_remove(block);
    drop(handle);
}

static void set_access(struct block *block, CUmemAccess_flags access) {
    block->access = access;
    mprotect((void *)block->base, block->size, protection(access));
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    API_CALL();
    pthread_mutex_lock(&blocks_lock);
    CUresult result = over_mappings(pointer, size, CU_MEM_ACCESS_FLAGS_PROT_NONE, unmap);
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access,
                        size_t count) {
    API_CALL();
    CUmemAccess_flags most = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (access == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            return CUDA_ERROR_NOT_SUPPORTED;
        if (!device_valid(access[i].location.id))
            return CUDA_ERROR_INVALID_DEVICE;
        if (access[i].flags > most)
            most = access[i].flags;
    }
    pthread_mutex_lock(&blocks_lock);
    CUresult result = over_mappings(pointer, size, most, set_access);
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
        *flags = block->access;
    pthread_mutex_unlock(&blocks_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle number) {
    API_CALL();
    if (properties == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    struct handle *handle = find_handle(number);
    if (handle != NULL)
        *properties = handle->properties;
    pthread_mutex_unlock(&blocks_lock);
    return handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *number, void *address) {
    API_CALL();
    if (number == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)address);
    bool found = block != NULL && block->kind == BLOCK_MAPPED;
    if (found) {
        find_handle(block->handle)->refs++;
        *number = block->handle;
    }
    pthread_mutex_unlock(&blocks_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle number,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    API_CALL();
    if (shareable == NULL || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    int copy = -1;
    pthread_mutex_lock(&blocks_lock);
    struct handle *handle = find_handle(number);
    if (handle != NULL && handle->memory >= 0) {
        copy = fcntl(handle->memory, F_DUPFD_CLOEXEC, 0);
        handle->exported = handle->exported || copy >= 0;
    }
    pthread_mutex_unlock(&blocks_lock);
    if (copy >= 0)
        *(int *)shareable = copy;
    return copy >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *number, void *shareable,
                                        CUmemAllocationHandleType type) {
    API_CALL();
    CUcontext context;
    struct stat memory;
    if (context_current(&context) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (number == NULL || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    int copy = fcntl((int)(intptr_t)shareable, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = type,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, context->device},
    };
    struct handle *made = NULL;
    pthread_mutex_lock(&blocks_lock);
    if (fstat(copy, &memory) == 0 && memory.st_size > 0)
        made = make_handle(&properties, (size_t)memory.st_size, copy);
    if (made != NULL)
        made->imported = true;
    pthread_mutex_unlock(&blocks_lock);
    if (made == NULL) {
        close(copy);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *number = (CUmemGenericAllocationHandle)(uintptr_t)made;
    return CUDA_SUCCESS;
}

/* The attribute says so, too. */
CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle,
                           const CUmulticastObjectProp *properties) {
    API_CALL();
    (void)handle;
    (void)properties;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
    API_CALL();
    (void)handle;
    (void)device;
    return CUDA_ERROR_NOT_SUPPORTED;
}
