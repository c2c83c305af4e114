/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Legacy IPC. The memory behind a handle becomes a memfd when the handle is asked for; whoever opens
 * it does so below /proc/PID/fd, so both must be in one pid namespace.
 */
#include "blocks.h"
#include "context.h"
#include "gate.h"
#include "stream.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct ipc {
    char magic[8];
    int pid, descriptor;
    uint64_t size, offset;
};
_Static_assert(sizeof(struct ipc) <= sizeof(CUipcMemHandle), "a handle holds 64 bytes");

#define MAGIC "simcuda"

/* With blocks_lock held and nothing running: the same content and address, but shared. */
static int share(struct block *block) {
    size_t bytes = whole_pages(block->size);
    int memory = memfd_create("liveshift simulated GPU", MFD_CLOEXEC);
    if (memory < 0)
        return -1;
    for (size_t done = 0; done < bytes;) {
        ssize_t now = write(memory, (const char *)block->base + done, bytes - done);
        if (now <= 0)
            break;
        done += (size_t)now;
    }
    if (lseek(memory, 0, SEEK_CUR) != (off_t)bytes ||
        mmap((void *)block->base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory,
             0) == MAP_FAILED) {
        close(memory);
        return -1;
    }
    return memory;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    API_CALL();
    if (handle == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    streams_drain(NULL, NULL);
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    CUresult result = CUDA_SUCCESS;
    if (block == NULL || block->kind != BLOCK_DEVICE)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (block->shared < 0 && (block->shared = share(block)) < 0)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        struct ipc ipc = {MAGIC, getpid(), block->shared, block->size, pointer - block->base};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &ipc, sizeof ipc);
    }
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    API_CALL();
    struct ipc ipc;
    char path[64];
    CUcontext context;
    if (context_current(&context) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_CONTEXT;
    memcpy(&ipc, &handle, sizeof ipc);
    if (pointer == NULL || flags != 1 || memcmp(ipc.magic, MAGIC, sizeof ipc.magic) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    /* A process can't open its own handle. */
    if (ipc.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ipc.pid, ipc.descriptor);
    int memory = open(path, O_RDWR | O_CLOEXEC);
    if (memory < 0)
        return CUDA_ERROR_MAP_FAILED;
    void *base = mmap(NULL, whole_pages(ipc.size), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    close(memory);
    if (base == MAP_FAILED)
        return CUDA_ERROR_MAP_FAILED;
    pthread_mutex_lock(&blocks_lock);
    block_add((struct block){.base = (uintptr_t)base,
                             .size = ipc.size,
                             .kind = BLOCK_IPC,
                             .device = context->device,
                             .shared = -1});
    pthread_mutex_unlock(&blocks_lock);
    *pointer = (CUdeviceptr)(uintptr_t)base + ipc.offset;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    API_CALL();
    streams_drain(NULL, NULL);
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at((uintptr_t)pointer);
    uintptr_t base = block && block->kind == BLOCK_IPC ? block->base : 0;
    pthread_mutex_unlock(&blocks_lock);
    return base ? block_free(base, BLOCK_IPC, BLOCK_IPC) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event) {
    API_CALL();
    (void)handle;
    (void)event;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle) {
    API_CALL();
    (void)event;
    (void)handle;
    return CUDA_ERROR_NOT_SUPPORTED;
}
