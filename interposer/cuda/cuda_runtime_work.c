/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of the CUDA runtime's streams, events and graphs. */

#include "cuda_hooks.h"

RUNTIME_HOOK(cudaStreamCreate, (void **stream),
             RECORDS(real(stream), stream_created(number(*stream), runtime_device(), 0, 0)))

RUNTIME_HOOK(cudaStreamCreateWithFlags, (void **stream, unsigned flags),
             RECORDS(real(stream, flags),
                     stream_created(number(*stream), runtime_device(), flags, 0)))

RUNTIME_HOOK(cudaStreamCreateWithPriority, (void **stream, unsigned flags, int priority),
             RECORDS(real(stream, flags, priority),
                     stream_created(number(*stream), runtime_device(), flags, priority)))

RUNTIME_HOOK(cudaStreamDestroy, (void *stream), DESTROYS_STREAM(stream, real(stream)))

RUNTIME_HOOK(cudaEventCreate, (void **event), RECORDS(real(event), count_events(+1)))

RUNTIME_HOOK(cudaEventCreateWithFlags, (void **event, unsigned flags),
             RECORDS(real(event, flags), count_events(+1)))

EXPORTED int cudaEventDestroy(void *event) {
    RUNTIME(cudaEventDestroy);
    int result = FREES(LEDGER_EVENT, number(event), real(event));
    if (RECORDED(result))
        count_events(-1);
    return result;
}

RUNTIME_HOOK(cudaIpcGetEventHandle, (struct ipc_handle * handle, void *event),
             RECORDS(real(handle, event), record_shared_event(runtime_device(), event, false)))

RUNTIME_HOOK(cudaIpcOpenEventHandle, (void **event, struct ipc_handle handle),
             RECORDS(real(event, handle), record_shared_event(runtime_device(), *event, true)))

/* Functions that take a stream have a variant for a default stream per thread. */
#define CAPTURED(suffix)                                                                           \
    RUNTIME_HOOK(                                                                                  \
        cudaStreamBeginCapture##suffix, (void *stream, int mode),                                  \
        RECORDS(real(stream, mode), capture_begun(number(stream), runtime_device(), false)))       \
    RUNTIME_HOOK(                                                                                  \
        cudaStreamBeginCaptureToGraph##suffix,                                                     \
        (void *stream, void *graph, const void *after, const void *edges, size_t n, int mode),     \
        RECORDS(real(stream, graph, after, edges, n, mode),                                        \
                capture_begun(number(stream), runtime_device(), true)))                            \
    RUNTIME_HOOK(cudaStreamEndCapture##suffix, (void *stream, void **graph),                       \
                 ENDS_CAPTURE(stream, runtime_device(), graph, real(stream, graph)))               \
    RUNTIME_HOOK(cudaGraphInstantiateWithParams##suffix,                                           \
                 (void **made_one, void *graph, void *parameters),                                 \
                 RECORDS(real(made_one, graph, parameters),                                        \
                         graph_copied(number(graph), number(*made_one), true)))
CAPTURED()
CAPTURED(_ptsz)

/* The function has five parameters in CUDA 11, three in later versions. The hook passes all five on
   as they came in registers. */
RUNTIME_HOOK(cudaGraphInstantiate,
             (void **made_one, void *graph, uintptr_t third, uintptr_t fourth, uintptr_t fifth),
             RECORDS(real(made_one, graph, third, fourth, fifth),
                     graph_copied(number(graph), number(*made_one), true)))

RUNTIME_HOOK(cudaGraphInstantiateWithFlags,
             (void **made_one, void *graph, unsigned long long flags),
             RECORDS(real(made_one, graph, flags),
                     graph_copied(number(graph), number(*made_one), true)))

RUNTIME_HOOK(cudaGraphCreate, (void **graph, unsigned flags),
             RECORDS(real(graph, flags), graph_created()))

RUNTIME_HOOK(cudaGraphClone, (void **clone, void *graph),
             RECORDS(real(clone, graph), graph_copied(number(graph), number(*clone), false)))

RUNTIME_HOOK(cudaGraphDestroy, (void *graph), DESTROYS_GRAPH(graph, false, real(graph)))

RUNTIME_HOOK(cudaGraphExecDestroy, (void *graph), DESTROYS_GRAPH(graph, true, real(graph)))
