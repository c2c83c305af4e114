/* SPDX-License-Identifier: Apache-2.0 */
/* memcpy and memset, as work on streams. */
#include "blocks.h"
#include "gate.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>

struct transfer {
    void *to;
    const void *from;
    size_t bytes;
    /* memset: the pattern, and its size; copy: 0. */
    unsigned int value;
    size_t element;
    /* What was staged of pageable memory when the copy was submitted. */
    char staged[];
};

static void run(void *argument) {
    const struct transfer *transfer = argument;
    if (transfer->element == 0) {
        memmove(transfer->to, transfer->from, transfer->bytes);
        return;
    }
    for (size_t i = 0; i < transfer->bytes; i += transfer->element)
        memcpy((char *)transfer->to + i, &transfer->value, transfer->element);
}

static bool known(CUdeviceptr pointer) {
    pthread_mutex_lock(&blocks_lock);
    bool found = block_at((uintptr_t)pointer) != NULL;
    pthread_mutex_unlock(&blocks_lock);
    return found;
}

static CUresult submit(struct transfer *transfer, CUstream stream, bool wait) {
    struct work work = {run, transfer, free,
                        transfer->element ? CU_GRAPH_NODE_TYPE_MEMSET : CU_GRAPH_NODE_TYPE_MEMCPY};
    CUresult result = wait ? stream_do(stream, work) : stream_submit(stream, work);
    if (result != CUDA_SUCCESS)
        free(transfer);
    return result;
}

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, bool wait) {
    bool device_to = known(to), device_from = known(from);
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (to == 0 || from == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!wait)
        cuStreamIsCapturing(stream, &capturing);
    bool capture = capturing == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    /* What an asynchronous copy does with pageable memory, as the CUDA documentation has it: from
       the host it returns once the bytes are staged, to the host once the copy is done. */
    bool stage = !wait && !capture && !device_from;
    wait = wait || (!capture && !device_to);
    struct transfer *transfer = malloc(sizeof *transfer + (stage ? bytes : 0));
    if (transfer == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *transfer =
        (struct transfer){(void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes, 0, 0};
    if (stage) {
        memcpy(transfer->staged, transfer->from, bytes);
        transfer->from = transfer->staged;
    }
    return submit(transfer, stream, wait);
}

static CUresult set(CUdeviceptr to, unsigned int value, size_t element, size_t count,
                    CUstream stream) {
    if (count == 0)
        return CUDA_SUCCESS;
    if (!known(to) || to % element != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct transfer *transfer = malloc(sizeof *transfer);
    *transfer = (struct transfer){(void *)(uintptr_t)to, NULL, count * element, value, element};
    return submit(transfer, stream, false);
}

/* ---- entry points ----------------------------------------------------------------------------- */

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    API_CALL();
    return copy(to, from, bytes, NULL, true);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    API_CALL();
    return copy(to, from, bytes, stream, false);
}

#define CHECK_KNOWN(pointer)                                                                       \
    API_CALL();                                                                                    \
    if (bytes > 0 && !known(pointer))                                                              \
    return CUDA_ERROR_INVALID_VALUE

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    CHECK_KNOWN(to);
    return copy(to, (CUdeviceptr)(uintptr_t)from, bytes, NULL, true);
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    CHECK_KNOWN(from);
    return copy((CUdeviceptr)(uintptr_t)to, from, bytes, NULL, true);
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    CHECK_KNOWN(to);
    return copy(to, from, bytes, NULL, true);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    CHECK_KNOWN(to);
    return copy(to, (CUdeviceptr)(uintptr_t)from, bytes, stream, false);
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    CHECK_KNOWN(from);
    return copy((CUdeviceptr)(uintptr_t)to, from, bytes, stream, false);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    CHECK_KNOWN(to);
    return copy(to, from, bytes, stream, false);
}
CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext toContext, CUdeviceptr from, CUcontext fromContext,
                      size_t bytes) {
    CHECK_KNOWN(to);
    (void)toContext;
    (void)fromContext;
    return copy(to, from, bytes, NULL, true);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext toContext, CUdeviceptr from,
                           CUcontext fromContext, size_t bytes, CUstream stream) {
    CHECK_KNOWN(to);
    (void)toContext;
    (void)fromContext;
    return copy(to, from, bytes, stream, false);
}

/* cuMemset is asynchronous towards the host, too. */
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    API_CALL();
    return set(to, value, 1, count, NULL);
}
CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
    API_CALL();
    return set(to, value, 2, count, NULL);
}
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count) {
    API_CALL();
    return set(to, value, 4, count, NULL);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    API_CALL();
    return set(to, value, 1, count, stream);
}
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    API_CALL();
    return set(to, value, 2, count, stream);
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
    API_CALL();
    return set(to, value, 4, count, stream);
}
