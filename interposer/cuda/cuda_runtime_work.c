/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of the CUDA runtime's streams, events and graphs. */

#include "cuda_hooks.h"

EXPORTED int cudaStreamCreate(void **stream) {
    RUNTIME(cudaStreamCreate);
    int result = CUDA_CALL(real(stream));
    if (RECORDED(result))
        stream_created(number(*stream), runtime_device(), 0, 0);
    return result;
}

EXPORTED int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    RUNTIME(cudaStreamCreateWithFlags);
    int result = CUDA_CALL(real(stream, flags));
    if (RECORDED(result))
        stream_created(number(*stream), runtime_device(), flags, 0);
    return result;
}

EXPORTED int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    RUNTIME(cudaStreamCreateWithPriority);
    int result = CUDA_CALL(real(stream, flags, priority));
    if (RECORDED(result))
        stream_created(number(*stream), runtime_device(), flags, priority);
    return result;
}

EXPORTED int cudaStreamDestroy(void *stream) {
    RUNTIME(cudaStreamDestroy);
    return DESTROYS_STREAM(stream, real(stream));
}

EXPORTED int cudaEventCreate(void **event) {
    RUNTIME(cudaEventCreate);
    int result = CUDA_CALL(real(event));
    if (RECORDED(result))
        count_events(+1);
    return result;
}

EXPORTED int cudaEventCreateWithFlags(void **event, unsigned flags) {
    RUNTIME(cudaEventCreateWithFlags);
    int result = CUDA_CALL(real(event, flags));
    if (RECORDED(result))
        count_events(+1);
    return result;
}

EXPORTED int cudaEventDestroy(void *event) {
    RUNTIME(cudaEventDestroy);
    int result = FREES(LEDGER_EVENT, number(event), real(event));
    if (RECORDED(result))
        count_events(-1);
    return result;
}

EXPORTED int cudaIpcGetEventHandle(struct ipc_handle *handle, void *event) {
    RUNTIME(cudaIpcGetEventHandle);
    int result = CUDA_CALL(real(handle, event));
    if (RECORDED(result))
        record_allocation(LEDGER_EVENT, LIVESHIFT_MEMORY_EVENT, runtime_device(), number(event), 0,
                          0, 0);
    return result;
}

EXPORTED int cudaIpcOpenEventHandle(void **event, struct ipc_handle handle) {
    RUNTIME(cudaIpcOpenEventHandle);
    int result = CUDA_CALL(real(event, handle));
    if (RECORDED(result)) {
        record_allocation(LEDGER_EVENT, LIVESHIFT_MEMORY_EVENT, runtime_device(), number(*event), 0,
                          0, 1);
        count_events(+1);
    }
    return result;
}

/* Functions that take a stream have a variant for a default stream per thread. */
#define CAPTURED(suffix)                                                                           \
    EXPORTED int cudaStreamBeginCapture##suffix(void *stream, int mode) {                          \
        RUNTIME(cudaStreamBeginCapture##suffix);                                                   \
        int result = CUDA_CALL(real(stream, mode));                                                \
        if (RECORDED(result))                                                                      \
            capture_begun(number(stream), runtime_device(), false);                                \
        return result;                                                                             \
    }                                                                                              \
    EXPORTED int cudaStreamBeginCaptureToGraph##suffix(                                            \
        void *stream, void *graph, const void *after, const void *edges, size_t n, int mode) {     \
        RUNTIME(cudaStreamBeginCaptureToGraph##suffix);                                            \
        int result = CUDA_CALL(real(stream, graph, after, edges, n, mode));                        \
        if (RECORDED(result))                                                                      \
            capture_begun(number(stream), runtime_device(), true);                                 \
        return result;                                                                             \
    }                                                                                              \
    EXPORTED int cudaStreamEndCapture##suffix(void *stream, void **graph) {                        \
        RUNTIME(cudaStreamEndCapture##suffix);                                                     \
        return ENDS_CAPTURE(stream, runtime_device(), graph, real(stream, graph));                 \
    }                                                                                              \
    EXPORTED int cudaGraphInstantiateWithParams##suffix(void **made_one, void *graph,              \
                                                        void *parameters) {                        \
        RUNTIME(cudaGraphInstantiateWithParams##suffix);                                           \
        int result = CUDA_CALL(real(made_one, graph, parameters));                                 \
        if (RECORDED(result))                                                                      \
            graph_copied(number(graph), number(*made_one), true);                                  \
        return result;                                                                             \
    }
CAPTURED()
CAPTURED(_ptsz)

/* The function has five parameters in CUDA 11, three in later versions. The hook passes all five on
   as they came in registers. */
EXPORTED int cudaGraphInstantiate(void **made_one, void *graph, uintptr_t third, uintptr_t fourth,
                                  uintptr_t fifth) {
    RUNTIME(cudaGraphInstantiate);
    int result = CUDA_CALL(real(made_one, graph, third, fourth, fifth));
    if (RECORDED(result))
        graph_copied(number(graph), number(*made_one), true);
    return result;
}

EXPORTED int cudaGraphInstantiateWithFlags(void **made_one, void *graph, unsigned long long flags) {
    RUNTIME(cudaGraphInstantiateWithFlags);
    int result = CUDA_CALL(real(made_one, graph, flags));
    if (RECORDED(result))
        graph_copied(number(graph), number(*made_one), true);
    return result;
}

EXPORTED int cudaGraphCreate(void **graph, unsigned flags) {
    RUNTIME(cudaGraphCreate);
    int result = CUDA_CALL(real(graph, flags));
    if (RECORDED(result))
        graph_created(number(*graph));
    return result;
}

EXPORTED int cudaGraphClone(void **clone, void *graph) {
    RUNTIME(cudaGraphClone);
    int result = CUDA_CALL(real(clone, graph));
    if (RECORDED(result))
        graph_copied(number(graph), number(*clone), false);
    return result;
}

EXPORTED int cudaGraphDestroy(void *graph) {
    RUNTIME(cudaGraphDestroy);
    return DESTROYS_GRAPH(graph, false, real(graph));
}

EXPORTED int cudaGraphExecDestroy(void *graph) {
    RUNTIME(cudaGraphExecDestroy);
    return DESTROYS_GRAPH(graph, true, real(graph));
}
