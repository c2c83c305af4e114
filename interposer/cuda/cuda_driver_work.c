/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of the CUDA driver's streams, events and graphs; cuda_driver.c says which programs call
   them. */

#include "cuda_driver.h"

HOOK(cuStreamCreate)(void **stream, unsigned flags) {
    DRIVER(cuStreamCreate);
    int result = CUDA_CALL(real(stream, flags));
    if (RECORDED(result))
        stream_created(number(*stream), driver_device(), flags, 0);
    return result;
}

HOOK(cuStreamCreateWithPriority)(void **stream, unsigned flags, int priority) {
    DRIVER(cuStreamCreateWithPriority);
    int result = CUDA_CALL(real(stream, flags, priority));
    if (RECORDED(result))
        stream_created(number(*stream), driver_device(), flags, priority);
    return result;
}

HOOK(cuStreamDestroy_v2)(void *stream) {
    DRIVER(cuStreamDestroy_v2);
    return DESTROYS_STREAM(stream, real(stream));
}

HOOK(cuEventCreate)(void **event, unsigned flags) {
    DRIVER(cuEventCreate);
    int result = CUDA_CALL(real(event, flags));
    if (RECORDED(result))
        count_events(+1);
    return result;
}

HOOK(cuEventDestroy_v2)(void *event) {
    DRIVER(cuEventDestroy_v2);
    int result = FREES(LEDGER_EVENT, number(event), real(event));
    if (RECORDED(result))
        count_events(-1);
    return result;
}

HOOK(cuIpcGetEventHandle)(struct ipc_handle *handle, void *event) {
    DRIVER(cuIpcGetEventHandle);
    int result = CUDA_CALL(real(handle, event));
    if (RECORDED(result))
        record_allocation(LEDGER_EVENT, LIVESHIFT_MEMORY_EVENT, driver_device(), number(event), 0,
                          0, 0);
    return result;
}

HOOK(cuIpcOpenEventHandle)(void **event, struct ipc_handle handle) {
    DRIVER(cuIpcOpenEventHandle);
    int result = CUDA_CALL(real(event, handle));
    if (RECORDED(result)) {
        record_allocation(LEDGER_EVENT, LIVESHIFT_MEMORY_EVENT, driver_device(), number(*event), 0,
                          0, 1);
        count_events(+1);
    }
    return result;
}

#define CAPTURED(suffix)                                                                           \
    HOOK(cuStreamBeginCapture_v2##suffix)(void *stream, int mode) {                                \
        DRIVER(cuStreamBeginCapture_v2##suffix);                                                   \
        int result = CUDA_CALL(real(stream, mode));                                                \
        if (RECORDED(result))                                                                      \
            capture_begun(number(stream), driver_device(), false);                                 \
        return result;                                                                             \
    }                                                                                              \
    HOOK(cuStreamBeginCaptureToGraph##suffix)(void *stream, void *graph, const void *after,        \
                                              const void *edges, size_t n, int mode) {             \
        DRIVER(cuStreamBeginCaptureToGraph##suffix);                                               \
        int result = CUDA_CALL(real(stream, graph, after, edges, n, mode));                        \
        if (RECORDED(result))                                                                      \
            capture_begun(number(stream), driver_device(), true);                                  \
        return result;                                                                             \
    }                                                                                              \
    HOOK(cuStreamEndCapture##suffix)(void *stream, void **graph) {                                 \
        DRIVER(cuStreamEndCapture##suffix);                                                        \
        return ENDS_CAPTURE(stream, driver_device(), graph, real(stream, graph));                  \
    }                                                                                              \
    HOOK(cuGraphInstantiateWithParams##suffix)(void **made_one, void *graph, void *parameters) {   \
        DRIVER(cuGraphInstantiateWithParams##suffix);                                              \
        int result = CUDA_CALL(real(made_one, graph, parameters));                                 \
        if (RECORDED(result))                                                                      \
            graph_copied(number(graph), number(*made_one), true);                                  \
        return result;                                                                             \
    }
CAPTURED()
CAPTURED(_ptsz)

HOOK(cuGraphCreate)(void **graph, unsigned flags) {
    DRIVER(cuGraphCreate);
    int result = CUDA_CALL(real(graph, flags));
    if (RECORDED(result))
        graph_created(number(*graph));
    return result;
}

HOOK(cuGraphClone)(void **clone, void *graph) {
    DRIVER(cuGraphClone);
    int result = CUDA_CALL(real(clone, graph));
    if (RECORDED(result))
        graph_copied(number(graph), number(*clone), false);
    return result;
}

HOOK(cuGraphDestroy)(void *graph) {
    DRIVER(cuGraphDestroy);
    return DESTROYS_GRAPH(graph, false, real(graph));
}

HOOK(cuGraphInstantiate_v2)(void **made_one, void *graph, void *node, char *log, size_t size) {
    DRIVER(cuGraphInstantiate_v2);
    int result = CUDA_CALL(real(made_one, graph, node, log, size));
    if (RECORDED(result))
        graph_copied(number(graph), number(*made_one), true);
    return result;
}

HOOK(cuGraphInstantiateWithFlags)(void **made_one, void *graph, unsigned long long flags) {
    DRIVER(cuGraphInstantiateWithFlags);
    int result = CUDA_CALL(real(made_one, graph, flags));
    if (RECORDED(result))
        graph_copied(number(graph), number(*made_one), true);
    return result;
}

HOOK(cuGraphExecDestroy)(void *graph) {
    DRIVER(cuGraphExecDestroy);
    return DESTROYS_GRAPH(graph, true, real(graph));
}
