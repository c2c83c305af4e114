/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of the CUDA driver's streams, events and graphs; cuda_driver.c says which programs call
   them. */

#include "cuda_driver.h"

HOOK(cuStreamCreate)(void **stream, unsigned flags) {
    DRIVER(cuStreamCreate);
    return RECORDS(real(stream, flags), stream_created(number(*stream), driver_device(), flags, 0));
}

HOOK(cuStreamCreateWithPriority)(void **stream, unsigned flags, int priority) {
    DRIVER(cuStreamCreateWithPriority);
    return RECORDS(real(stream, flags, priority),
                   stream_created(number(*stream), driver_device(), flags, priority));
}

HOOK(cuStreamDestroy_v2)(void *stream) {
    DRIVER(cuStreamDestroy_v2);
    return DESTROYS_STREAM(stream, real(stream));
}

HOOK(cuEventCreate)(void **event, unsigned flags) {
    DRIVER(cuEventCreate);
    return RECORDS(real(event, flags), count_events(+1));
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
    return RECORDS(real(handle, event), record_shared_event(driver_device(), event, false));
}

HOOK(cuIpcOpenEventHandle)(void **event, struct ipc_handle handle) {
    DRIVER(cuIpcOpenEventHandle);
    return RECORDS(real(event, handle), record_shared_event(driver_device(), *event, true));
}

#define CAPTURED(suffix)                                                                           \
    HOOK(cuStreamBeginCapture_v2##suffix)(void *stream, int mode) {                                \
        DRIVER(cuStreamBeginCapture_v2##suffix);                                                   \
        return RECORDS(real(stream, mode), capture_begun(number(stream), driver_device(), false)); \
    }                                                                                              \
    HOOK(cuStreamBeginCaptureToGraph##suffix)(void *stream, void *graph, const void *after,        \
                                              const void *edges, size_t n, int mode) {             \
        DRIVER(cuStreamBeginCaptureToGraph##suffix);                                               \
        return RECORDS(real(stream, graph, after, edges, n, mode),                                 \
                       capture_begun(number(stream), driver_device(), true));                      \
    }                                                                                              \
    HOOK(cuStreamEndCapture##suffix)(void *stream, void **graph) {                                 \
        DRIVER(cuStreamEndCapture##suffix);                                                        \
        return ENDS_CAPTURE(stream, driver_device(), graph, real(stream, graph));                  \
    }                                                                                              \
    HOOK(cuGraphInstantiateWithParams##suffix)(void **made_one, void *graph, void *parameters) {   \
        DRIVER(cuGraphInstantiateWithParams##suffix);                                              \
        return RECORDS(real(made_one, graph, parameters),                                          \
                       graph_copied(number(graph), number(*made_one), true));                      \
    }
CAPTURED()
CAPTURED(_ptsz)

HOOK(cuGraphCreate)(void **graph, unsigned flags) {
    DRIVER(cuGraphCreate);
    return RECORDS(real(graph, flags), graph_created());
}

HOOK(cuGraphClone)(void **clone, void *graph) {
    DRIVER(cuGraphClone);
    return RECORDS(real(clone, graph), graph_copied(number(graph), number(*clone), false));
}

HOOK(cuGraphDestroy)(void *graph) {
    DRIVER(cuGraphDestroy);
    return DESTROYS_GRAPH(graph, false, real(graph));
}

HOOK(cuGraphInstantiate_v2)(void **made_one, void *graph, void *node, char *log, size_t size) {
    DRIVER(cuGraphInstantiate_v2);
    return RECORDS(real(made_one, graph, node, log, size),
                   graph_copied(number(graph), number(*made_one), true));
}

HOOK(cuGraphInstantiateWithFlags)(void **made_one, void *graph, unsigned long long flags) {
    DRIVER(cuGraphInstantiateWithFlags);
    return RECORDS(real(made_one, graph, flags),
                   graph_copied(number(graph), number(*made_one), true));
}

HOOK(cuGraphExecDestroy)(void *graph) {
    DRIVER(cuGraphExecDestroy);
    return DESTROYS_GRAPH(graph, true, real(graph));
}
