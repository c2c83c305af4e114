/* SPDX-License-Identifier: Apache-2.0 */
/* Stream capture and graphs. */
#include "contract.h"

static void capture(void) {
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    enum cudaStreamCaptureStatus status;
    size_t count = 0;
    _Atomic int runs = 0;
    char *device, *pinned;
    WORKS(cudaMalloc((void **)&device, 4096));
    WORKS(cudaMallocHost((void **)&pinned, 4096));
    WORKS(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    WORKS(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    WORKS(cudaStreamIsCapturing(s, &status));
    MUST(status == cudaStreamCaptureStatusActive);
    WORKS(cudaMemsetAsync(device, 3, 4096, s));
    WORKS(cudaMemcpyAsync(pinned, device, 4096, cudaMemcpyDeviceToHost, s));
    WORKS(cudaLaunchHostFunc(s, add_one, &runs));
    WORKS(cudaStreamEndCapture(s, &graph));
    MUST(runs == 0);
    WORKS(cudaGraphGetNodes(graph, NULL, &count));
    MUST(count == 3);
    WORKS(cudaGraphInstantiate(&exec, graph, 0));
    WORKS(cudaGraphDestroy(graph));
    for (int i = 0; i < 5; i++)
        WORKS(cudaGraphLaunch(exec, s));
    WORKS(cudaStreamSynchronize(s));
    MUST(runs == 5 && pinned[4095] == 3);
    WORKS(cudaGraphExecDestroy(exec));
    WORKS(cudaStreamIsCapturing(s, &status));
    MUST(status == cudaStreamCaptureStatusNone);
    WORKS(cudaStreamDestroy(s));
    WORKS(cudaFreeHost(pinned));
    WORKS(cudaFree(device));
    ok("a capture runs at each launch and not before");
}

static void fork_and_join(void) {
    cudaStream_t a, b;
    cudaEvent_t forked, joined;
    cudaGraph_t graph;
    enum cudaStreamCaptureStatus status;
    _Atomic int runs = 0;
    size_t count;
    WORKS(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    WORKS(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    WORKS(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    WORKS(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    WORKS(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    WORKS(cudaLaunchHostFunc(a, add_one, &runs));
    WORKS(cudaEventRecord(forked, a));
    WORKS(cudaStreamWaitEvent(b, forked, 0));
    WORKS(cudaStreamIsCapturing(b, &status));
    MUST(status == cudaStreamCaptureStatusActive);
    WORKS(cudaLaunchHostFunc(b, add_one, &runs));
    WORKS(cudaEventRecord(joined, b));
    WORKS(cudaStreamWaitEvent(a, joined, 0));
    WORKS(cudaLaunchHostFunc(a, add_one, &runs));
    WORKS(cudaStreamEndCapture(a, &graph));
    WORKS(cudaGraphGetNodes(graph, NULL, &count));
    MUST(count == 3 && runs == 0);
    WORKS(cudaGraphDestroy(graph));
    cudaGetLastError();
    ok("a capture spreads by events and comes together again");

    WORKS(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    WORKS(cudaEventRecord(forked, a));
    WORKS(cudaStreamWaitEvent(b, forked, 0));
    WORKS(cudaLaunchHostFunc(b, add_one, &runs));
    GIVES(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(a, &graph));
    MUST(graph == NULL);
    cudaGetLastError();
    ok("work that was not joined is an error");
    WORKS(cudaEventDestroy(forked));
    WORKS(cudaEventDestroy(joined));
    WORKS(cudaStreamDestroy(a));
    WORKS(cudaStreamDestroy(b));
}

static void captured_event(void) {
    cudaStream_t s;
    cudaEvent_t event;
    cudaGraph_t graph = NULL;
    WORKS(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    WORKS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    WORKS(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    WORKS(cudaEventRecord(event, s));
    GIVES(cudaErrorCapturedEvent, cudaEventQuery(event));
    note("a capture of which an event was asked ends with", cudaStreamEndCapture(s, &graph));
    cudaGetLastError();
    ok("an event that was captured can't be asked");
}

static void mistakes(void) {
    cudaStream_t s;
    cudaGraph_t graph;
    WORKS(cudaStreamCreate(&s));
    WORKS(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    GIVES(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(s));
    GIVES(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(s, &graph));
    WORKS(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    GIVES(cudaErrorStreamCaptureImplicit, cudaLaunchHostFunc(NULL, add_one, &graph));
    cudaStreamEndCapture(s, &graph);
    GIVES(cudaErrorStreamCaptureUnsupported,
          cudaStreamBeginCapture(cudaStreamLegacy, cudaStreamCaptureModeGlobal));
    cudaGetLastError();
    WORKS(cudaStreamDestroy(s));
    ok("waiting inside a capture spoils it");
}

static void kept(void) {
    cudaStream_t s;
    cudaGraph_t graph, captured;
    cudaGraphExec_t exec;
    cudaUserObject_t object;
    enum cudaStreamCaptureStatus status;
    unsigned long long id = 0;
    _Atomic int gone = 0;
    WORKS(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    WORKS(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    WORKS(cuStreamGetCaptureInfo_v2(s, (CUstreamCaptureStatus *)&status, (cuuint64_t *)&id,
                                    &captured, NULL, NULL));
    MUST(status == cudaStreamCaptureStatusActive && captured != NULL && id != 0);
    WORKS(cudaUserObjectCreate(&object, &gone, add_one, 1, 1));
    WORKS(cudaGraphRetainUserObject(captured, object, 1, 1));
    WORKS(cudaLaunchHostFunc(s, add_one, &(_Atomic int){0}));
    WORKS(cudaStreamEndCapture(s, &graph));
    WORKS(cudaGraphInstantiate(&exec, graph, 0));
    WORKS(cudaGraphDestroy(graph));
    MUST(gone == 0);
    WORKS(cudaGraphExecDestroy(exec));
    for (double end = now() + 10; gone == 0 && now() < end;)
        usleep(1000);
    MUST(gone == 1);
    WORKS(cudaStreamDestroy(s));
    ok("a graph keeps user objects until the last executable one is gone");
}

int main(void) {
    PLAY({"capture", capture}, {"fork and join", fork_and_join},
         {"a captured event", captured_event}, {"mistakes", mistakes}, {"kept", kept});
}
