/* SPDX-License-Identifier: Apache-2.0 */
/* Captures and graphs. */
#include "driver.h"

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    FORWARD(cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    FORWARD(cuStreamEndCapture(stream, graph));
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    FORWARD(cuStreamIsCapturing(stream, (CUstreamCaptureStatus *)status));
}

static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                unsigned long long *id, cudaGraph_t *graph,
                                const cudaGraphNode_t **dependencies,
                                const cudaGraphEdgeData **edges, size_t *count) {
    cuuint64_t number = 0;
    cudaError_t error = driver_ready();
    if (error == cudaSuccess)
        error = (cudaError_t)driver.cuStreamGetCaptureInfo(stream, (CUstreamCaptureStatus *)status,
                                                           &number, graph, dependencies, count);
    if (error == cudaSuccess && id != NULL)
        *id = number;
    if (edges != NULL)
        *edges = NULL;
    return noted(error);
}

#if CUDART_MAJOR == 13
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    return capture_info(stream, status, id, graph, dependencies, edges, count);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies, size_t *count);
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies,
                                        const cudaGraphEdgeData **edges, size_t *count);

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies, size_t *count) {
    return capture_info(stream, status, id, graph, dependencies, NULL, count);
}
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies,
                                        const cudaGraphEdgeData **edges, size_t *count) {
    return capture_info(stream, status, id, graph, dependencies, edges, count);
}
#endif

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    FORWARD(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}
cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned int flags) {
    FORWARD(cuGraphCreate(graph, flags));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { FORWARD(cuGraphDestroy(graph)); }
cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                 const cudaGraphNode_t *dependencies, size_t count,
                                 const struct cudaHostNodeParams *parameters) {
    FORWARD(cuGraphAddHostNode(node, graph, dependencies, count,
                               (const CUDA_HOST_NODE_PARAMS *)parameters));
}
cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                  const cudaGraphNode_t *dependencies, size_t count) {
    FORWARD(cuGraphAddEmptyNode(node, graph, dependencies, count));
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    FORWARD(cuGraphGetNodes(graph, nodes, count));
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                          unsigned long long flags) {
    FORWARD(cuGraphInstantiateWithFlags(exec, graph, flags));
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags) {
    FORWARD(cuGraphInstantiateWithFlags(exec, graph, flags));
}
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
    FORWARD(cuGraphUpload(exec, stream));
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    FORWARD(cuGraphLaunch(exec, stream));
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { FORWARD(cuGraphExecDestroy(exec)); }
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *pointer, cudaHostFn_t destroy,
                                 unsigned int references, unsigned int flags) {
    FORWARD(cuUserObjectCreate(object, pointer, destroy, references, flags));
}
cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned int count) {
    FORWARD(cuUserObjectRetain(object, count));
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count) {
    FORWARD(cuUserObjectRelease(object, count));
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                      unsigned int count, unsigned int flags) {
    FORWARD(cuGraphRetainUserObject(graph, object, count, flags));
}
cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                       unsigned int count) {
    FORWARD(cuGraphReleaseUserObject(graph, object, count));
}
