/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of the CUDA driver's streams, events and graphs; cuda_driver.c says which programs call
   them. */

#include "cuda_driver.h"

DRIVER_HOOK(cuStreamCreate, (void **stream, unsigned flags),
            RECORDS(real(stream, flags),
                    stream_created(number(*stream), driver_device(), flags, 0)))

DRIVER_HOOK(cuStreamCreateWithPriority, (void **stream, unsigned flags, int priority),
            RECORDS(real(stream, flags, priority),
                    stream_created(number(*stream), driver_device(), flags, priority)))

DRIVER_HOOK(cuStreamDestroy_v2, (void *stream), DESTROYS_STREAM(stream, real(stream)))

DRIVER_HOOK(cuEventCreate, (void **event, unsigned flags),
            RECORDS(real(event, flags), count_events(+1)))

HOOK(cuEventDestroy_v2)(void *event) {
    DRIVER(cuEventDestroy_v2);
    int result = FREES(LEDGER_EVENT, number(event), real(event));
    if (RECORDED(result))
        count_events(-1);
    return result;
}

DRIVER_HOOK(cuIpcGetEventHandle, (struct ipc_handle * handle, void *event),
            RECORDS(real(handle, event), record_shared_event(driver_device(), event, false)))

DRIVER_HOOK(cuIpcOpenEventHandle, (void **event, struct ipc_handle handle),
            RECORDS(real(event, handle), record_shared_event(driver_device(), *event, true)))

#define CAPTURED(suffix)                                                                           \
    DRIVER_HOOK(                                                                                   \
        cuStreamBeginCapture_v2##suffix, (void *stream, int mode),                                 \
        RECORDS(real(stream, mode), capture_begun(number(stream), driver_device(), false)))        \
    DRIVER_HOOK(                                                                                   \
        cuStreamBeginCaptureToGraph##suffix,                                                       \
        (void *stream, void *graph, const void *after, const void *edges, size_t n, int mode),     \
        RECORDS(real(stream, graph, after, edges, n, mode),                                        \
                capture_begun(number(stream), driver_device(), true)))                             \
    DRIVER_HOOK(cuStreamEndCapture##suffix, (void *stream, void **graph),                          \
                ENDS_CAPTURE(stream, driver_device(), graph, real(stream, graph)))                 \
    DRIVER_HOOK(cuGraphInstantiateWithParams##suffix,                                              \
                (void **made_one, void *graph, void *parameters),                                  \
                RECORDS(real(made_one, graph, parameters),                                         \
                        graph_copied(number(graph), number(*made_one), true)))
CAPTURED()
CAPTURED(_ptsz)

DRIVER_HOOK(cuGraphCreate, (void **graph, unsigned flags),
            RECORDS(real(graph, flags), graph_created()))

DRIVER_HOOK(cuGraphClone, (void **clone, void *graph),
            RECORDS(real(clone, graph), graph_copied(number(graph), number(*clone), false)))

DRIVER_HOOK(cuGraphDestroy, (void *graph), DESTROYS_GRAPH(graph, false, real(graph)))

DRIVER_HOOK(cuGraphInstantiate_v2,
            (void **made_one, void *graph, void *node, char *log, size_t size),
            RECORDS(real(made_one, graph, node, log, size),
                    graph_copied(number(graph), number(*made_one), true)))

DRIVER_HOOK(cuGraphInstantiateWithFlags, (void **made_one, void *graph, unsigned long long flags),
            RECORDS(real(made_one, graph, flags),
                    graph_copied(number(graph), number(*made_one), true)))

DRIVER_HOOK(cuGraphExecDestroy, (void *graph), DESTROYS_GRAPH(graph, true, real(graph)))
