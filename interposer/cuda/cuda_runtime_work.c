/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of the CUDA runtime's streams, events and graphs. */

#include "cuda_hooks.h"

EXPORTED int cudaStreamCreate(void **stream) {
    RUNTIME(cudaStreamCreate);
    return RECORDS(real(stream), stream_created(number(*stream), runtime_device(), 0, 0));
}

EXPORTED int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    RUNTIME(cudaStreamCreateWithFlags);
    return RECORDS(real(stream, flags),
                   stream_created(number(*stream), runtime_device(), flags, 0));
}

EXPORTED int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    RUNTIME(cudaStreamCreateWithPriority);
    return RECORDS(real(stream, flags, priority),
                   stream_created(number(*stream), runtime_device(), flags, priority));
}

EXPORTED int cudaStreamDestroy(void *stream) {
    RUNTIME(cudaStreamDestroy);
    return DESTROYS_STREAM(stream, real(stream));
}

EXPORTED int cudaEventCreate(void **event) {
    RUNTIME(cudaEventCreate);
    return RECORDS(real(event), count_events(+1));
}

EXPORTED int cudaEventCreateWithFlags(void **event, unsigned flags) {
    RUNTIME(cudaEventCreateWithFlags);
    return RECORDS(real(event, flags), count_events(+1));
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
    return RECORDS(real(handle, event), record_shared_event(runtime_device(), event, false));
}

EXPORTED int cudaIpcOpenEventHandle(void **event, struct ipc_handle handle) {
    RUNTIME(cudaIpcOpenEventHandle);
    return RECORDS(real(event, handle), record_shared_event(runtime_device(), *event, true));
}

/* Functions that take a stream have a variant for a default stream per thread. */
#define CAPTURED(suffix)                                                                           \
    EXPORTED int cudaStreamBeginCapture##suffix(void *stream, int mode) {                          \
        RUNTIME(cudaStreamBeginCapture##suffix);                                                   \
        return RECORDS(real(stream, mode),                                                         \
                       capture_begun(number(stream), runtime_device(), false));                    \
    }                                                                                              \
    EXPORTED int cudaStreamBeginCaptureToGraph##suffix(                                            \
        void *stream, void *graph, const void *after, const void *edges, size_t n, int mode) {     \
        RUNTIME(cudaStreamBeginCaptureToGraph##suffix);                                            \
        return RECORDS(real(stream, graph, after, edges, n, mode),                                 \
                       capture_begun(number(stream), runtime_device(), true));                     \
    }                                                                                              \
    EXPORTED int cudaStreamEndCapture##suffix(void *stream, void **graph) {                        \
        RUNTIME(cudaStreamEndCapture##suffix);                                                     \
        return ENDS_CAPTURE(stream, runtime_device(), graph, real(stream, graph));                 \
    }                                                                                              \
    EXPORTED int cudaGraphInstantiateWithParams##suffix(void **made_one, void *graph,              \
                                                        void *parameters) {                        \
        RUNTIME(cudaGraphInstantiateWithParams##suffix);                                           \
        return RECORDS(real(made_one, graph, parameters),                                          \
                       graph_copied(number(graph), number(*made_one), true));                      \
    }
CAPTURED()
CAPTURED(_ptsz)

/* The function has five parameters in CUDA 11, three in later versions. The hook passes all five on
   as they came in registers. */
EXPORTED int cudaGraphInstantiate(void **made_one, void *graph, uintptr_t third, uintptr_t fourth,
                                  uintptr_t fifth) {
    RUNTIME(cudaGraphInstantiate);
    return RECORDS(real(made_one, graph, third, fourth, fifth),
                   graph_copied(number(graph), number(*made_one), true));
}

EXPORTED int cudaGraphInstantiateWithFlags(void **made_one, void *graph, unsigned long long flags) {
    RUNTIME(cudaGraphInstantiateWithFlags);
    return RECORDS(real(made_one, graph, flags),
                   graph_copied(number(graph), number(*made_one), true));
}

EXPORTED int cudaGraphCreate(void **graph, unsigned flags) {
    RUNTIME(cudaGraphCreate);
    return RECORDS(real(graph, flags), graph_created());
}

EXPORTED int cudaGraphClone(void **clone, void *graph) {
    RUNTIME(cudaGraphClone);
    return RECORDS(real(clone, graph), graph_copied(number(graph), number(*clone), false));
}

EXPORTED int cudaGraphDestroy(void *graph) {
    RUNTIME(cudaGraphDestroy);
    return DESTROYS_GRAPH(graph, false, real(graph));
}

EXPORTED int cudaGraphExecDestroy(void *graph) {
    RUNTIME(cudaGraphExecDestroy);
    return DESTROYS_GRAPH(graph, true, real(graph));
}
