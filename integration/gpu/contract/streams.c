/* SPDX-License-Identifier: Apache-2.0 */
/* Order and asynchrony of streams and events. */
#include "contract.h"

#include <pthread.h>

static _Atomic int step;
static int seen[8];
static void seen_now(void *index) { seen[(intptr_t)index] = ++step; }

static void asynchrony(void) {
    cudaStream_t s;
    struct hold hold = {0};
    _Atomic int count = 0;
    WORKS(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    WORKS(cudaStreamQuery(s));
    WORKS(cudaLaunchHostFunc(s, held, &hold));
    for (int i = 0; i < 100; i++)
        WORKS(cudaLaunchHostFunc(s, add_one, &count));
    GIVES(cudaErrorNotReady, cudaStreamQuery(s));
    MUST(count == 0);
    hold.go = 1;
    WORKS(cudaStreamSynchronize(s));
    MUST(count == 100);
    WORKS(cudaStreamQuery(s));
    WORKS(cudaStreamDestroy(s));
    cudaGetLastError();
    ok("work is done later, in order; a query says not ready until then");
}

static void events(void) {
    cudaStream_t a, b;
    cudaEvent_t e, start, untimed;
    struct hold hold = {0};
    float ms;
    WORKS(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    WORKS(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    WORKS(cudaEventCreate(&start));
    WORKS(cudaEventCreate(&e));
    WORKS(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    WORKS(cudaEventQuery(e));
    WORKS(cudaStreamWaitEvent(b, e, 0));
    step = 0;
    WORKS(cudaEventRecord(start, a));
    WORKS(cudaLaunchHostFunc(a, held, &hold));
    WORKS(cudaLaunchHostFunc(a, seen_now, (void *)0));
    WORKS(cudaEventRecord(e, a));
    WORKS(cudaStreamWaitEvent(b, e, 0));
    WORKS(cudaLaunchHostFunc(b, seen_now, (void *)1));
    GIVES(cudaErrorNotReady, cudaEventQuery(e));
    GIVES(cudaErrorNotReady, cudaEventElapsedTime(&ms, start, e));
    GIVES(cudaErrorNotReady, cudaStreamQuery(b));
    for (double end = now() + 60; !hold.begun && now() < end;)
        usleep(500); /* the time between the events begins before that */
    MUST(hold.begun);
    usleep(20000);
    hold.go = 1;
    WORKS(cudaStreamSynchronize(b));
    MUST(seen[0] == 1 && seen[1] == 2);
    WORKS(cudaEventSynchronize(e));
    WORKS(cudaEventElapsedTime(&ms, start, e));
    MUST(ms >= 15 && ms < 60000);
    WORKS(cudaEventRecord(untimed, a));
    WORKS(cudaEventSynchronize(untimed));
    GIVES(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, start, untimed));
    WORKS(cudaEventDestroy(start));
    WORKS(cudaEventDestroy(e));
    WORKS(cudaEventDestroy(untimed));
    WORKS(cudaStreamDestroy(a));
    WORKS(cudaStreamDestroy(b));
    cudaGetLastError();
    ok("events order streams and measure time");
}

/* A wait is for what was recorded when it was submitted. */
static void event_again(void) {
    cudaStream_t a, b;
    cudaEvent_t e;
    struct hold hold = {0};
    WORKS(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    WORKS(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    WORKS(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    WORKS(cudaEventRecord(e, a));
    WORKS(cudaStreamWaitEvent(b, e, 0));
    WORKS(cudaLaunchHostFunc(a, held, &hold));
    WORKS(cudaEventRecord(e, a));
    WORKS(cudaStreamSynchronize(b));
    GIVES(cudaErrorNotReady, cudaEventQuery(e));
    WORKS(cudaEventDestroy(e));
    hold.go = 1;
    WORKS(cudaStreamSynchronize(a));
    WORKS(cudaStreamDestroy(a));
    WORKS(cudaStreamDestroy(b));
    cudaGetLastError();
    ok("a wait is for the record before it");
}

/* The driver runs host functions of all streams by one thread: one that waits holds up all. */
static void default_stream(void) {
    cudaStream_t blocking, apart;
    struct hold hold = {0};
    char *device, *pinned;
    WORKS(cudaMalloc((void **)&device, 4096));
    WORKS(cudaMallocHost((void **)&pinned, 4096));
    WORKS(cudaStreamCreate(&blocking));
    WORKS(cudaStreamCreateWithFlags(&apart, cudaStreamNonBlocking));
    step = 0;
    WORKS(cudaLaunchHostFunc(blocking, held, &hold));
    WORKS(cudaLaunchHostFunc(blocking, seen_now, (void *)0));
    WORKS(cudaLaunchHostFunc(NULL, seen_now, (void *)1));
    WORKS(cudaLaunchHostFunc(blocking, seen_now, (void *)2));
    WORKS(cudaMemsetAsync(device, 5, 4096, apart));
    WORKS(cudaMemcpyAsync(pinned, device, 4096, cudaMemcpyDeviceToHost, apart));
    WORKS(cudaStreamSynchronize(apart));
    MUST(pinned[4095] == 5 && step == 0);
    GIVES(cudaErrorNotReady, cudaStreamQuery(NULL));
    hold.go = 1;
    WORKS(cudaStreamSynchronize(blocking));
    MUST(seen[0] == 1 && seen[1] == 2 && seen[2] == 3);
    WORKS(cudaDeviceSynchronize());
    WORKS(cudaStreamDestroy(blocking));
    WORKS(cudaStreamDestroy(apart));
    cudaGetLastError();
    ok("the legacy default stream waits for blocking streams, and they for it");
}

static void destroyed_with_work(void) {
    cudaStream_t s;
    struct hold hold = {0};
    _Atomic int count = 0;
    WORKS(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    WORKS(cudaLaunchHostFunc(s, held, &hold));
    WORKS(cudaLaunchHostFunc(s, add_one, &count));
    WORKS(cudaStreamDestroy(s));
    hold.go = 1;
    for (double end = now() + 10; count == 0 && now() < end;)
        usleep(1000);
    MUST(count == 1);
    ok("a destroyed stream finishes what it was given");
}

static void properties(void) {
    cudaStream_t s;
    unsigned int flags;
    int least, greatest, priority, device = -1;
    WORKS(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    WORKS(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, greatest));
    WORKS(cudaStreamGetFlags(s, &flags));
    WORKS(cudaStreamGetPriority(s, &priority));
    MUST(flags == cudaStreamNonBlocking && priority == greatest && greatest <= least);
    WORKS(cudaGetDevice(&device));
    MUST(device == 0);
    WORKS(cudaStreamDestroy(s));
    ok("streams have flags and priorities");
}

/* What a thread submits runs for it, several at once. */
static void *storm(void *argument) {
    _Atomic int *count = argument;
    cudaStream_t s;
    cudaEvent_t e;
    WORKS(cudaSetDevice(0));
    WORKS(cudaStreamCreate(&s));
    WORKS(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    for (int i = 0; i < 50; i++) {
        WORKS(cudaLaunchHostFunc(s, add_one, count));
        WORKS(cudaEventRecord(e, s));
        WORKS(cudaStreamWaitEvent(cudaStreamLegacy, e, 0));
        if (i % 10 == 0)
            WORKS(cudaStreamSynchronize(s));
    }
    WORKS(cudaStreamSynchronize(cudaStreamPerThread));
    WORKS(cudaStreamSynchronize(NULL));
    WORKS(cudaEventDestroy(e));
    WORKS(cudaStreamDestroy(s));
    return NULL;
}

static void threads(void) {
    pthread_t thread[4];
    _Atomic int count = 0;
    for (int i = 0; i < 4; i++)
        MUST(pthread_create(&thread[i], NULL, storm, &count) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    MUST(count == 200);
    ok("threads submit at once");
}

int main(void) {
    PLAY({"asynchrony", asynchrony}, {"events", events}, {"event again", event_again},
         {"default stream", default_stream}, {"destroyed with work", destroyed_with_work},
         {"properties", properties}, {"threads", threads});
}
