/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Physical memory of the VMM API: a shared mapping ("home"), which mremap with an old size of 0 maps
 * once more wherever it is wanted. That needs no descriptor; only a handle that may be exported is a
 * memfd.
 */
#include "handles.h"

#include "blocks.h"
#include "content.h"
#include "context.h"
#include "device.h"
#include "gate.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct handle *handles;

struct handle *handle_find(CUmemGenericAllocationHandle number) {
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

void handle_drop(struct handle *handle) {
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

/* ---- entry points ----------------------------------------------------------------------------- */

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    API_CALL();
    if (granularity == NULL || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return check_properties(properties);
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
    struct handle *made = result == CUDA_SUCCESS ? make_handle(properties, size, memory) : NULL;
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
    struct handle *handle = handle_find(number);
    if (handle != NULL)
        handle_drop(handle);
    pthread_mutex_unlock(&blocks_lock);
    return handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle number) {
    API_CALL();
    if (properties == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    struct handle *handle = handle_find(number);
    if (handle != NULL)
        *properties = handle->properties;
    pthread_mutex_unlock(&blocks_lock);
    return handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle number,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    API_CALL();
    if (shareable == NULL || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    int copy = -1;
    pthread_mutex_lock(&blocks_lock);
    struct handle *handle = handle_find(number);
    /* Driver 580 exports nothing that was imported (E7 on an H100, 2026-11). */
    bool refused = handle != NULL && handle->imported;
    if (handle != NULL && handle->memory >= 0 && !refused) {
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
    /* Counted with everyone who has it: it stays when whoever made it has let go. */
    if (fstat(copy, &memory) == 0 && memory.st_size > 0 &&
        device_charge(context->device, (size_t)memory.st_size) == CUDA_SUCCESS)
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
