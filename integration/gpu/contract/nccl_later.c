/* SPDX-License-Identifier: Apache-2.0 */
/* What came after NCCL 2.26 and liveshift has to know of: revoke, suspend, one-sided operations. */
#include "nccl_ranks.h"

#define COUNT 64

static int *numbers;
static CUstream stream;

static int sum(ncclComm_t comm, int mine) {
    int total;
    upload(numbers, &mine, sizeof mine);
    NCCL(ncclAllReduce(numbers, numbers, 1, ncclInt32, ncclSum, comm, stream));
    finish(stream);
    download(&total, numbers, sizeof total);
    return total;
}

/* A hanging collective ends, and the members go on with a communicator made from the revoked one. */
static void revoked(const struct rank *self) {
    __typeof__(&ncclCommRevoke) function = LOOKUP(ncclCommRevoke);
    ncclComm_t comm, fresh;
    if (function == NULL) {
        skipped(self, "revoke");
        return;
    }
    comm = world(self);
    REQUIRE(sum(comm, 1) == self->count, "before");
    if (self->rank == 0)
        NCCL(ncclAllReduce(numbers, numbers, 1, ncclInt32, ncclSum, comm, stream));
    barrier(self);
    NCCL(function(comm, NCCL_REVOKE_DEFAULT));
    finish(stream);
    ok(self, "revoke ends a collective that hangs");
    REQUIRE(ncclCommFinalize(comm) != ncclSuccess, "finalize of a revoked communicator");
    NCCL(ncclCommSplit(comm, 0, self->rank, &fresh, NULL));
    REQUIRE(sum(fresh, 2) == 2 * self->count, "after");
    NCCL(ncclCommDestroy(fresh));
    NCCL(ncclCommDestroy(comm));
    ok(self, "a revoked communicator can be split, and destroyed, not finalized");
}

static void suspended(const struct rank *self) {
    __typeof__(&ncclCommSuspend) function = LOOKUP(ncclCommSuspend);
    __typeof__(&ncclCommMemStats) stats = LOOKUP(ncclCommMemStats);
    uint64_t value = 0;
    if (function == NULL) {
        skipped(self, "suspend and resume");
        return;
    }
    ncclComm_t comm = world(self);
    REQUIRE(sum(comm, 1) == self->count, "before");
    NCCL(function(comm, NCCL_SUSPEND_MEM));
    NCCL(stats(comm, ncclStatGpuMemSuspended, &value));
    REQUIRE(value == 1, "%d", (int)value);
    NCCL(LOOKUP(ncclCommResume)(comm));
    NCCL(stats(comm, ncclStatGpuMemSuspended, &value));
    REQUIRE(value == 0, "%d", (int)value);
    REQUIRE(sum(comm, 1) == self->count, "after");
    NCCL(ncclCommDestroy(comm));
    ok(self, "suspended and resumed");
}

static void one_sided(const struct rank *self) {
    __typeof__(&ncclPutSignal) put = LOOKUP(ncclPutSignal);
    ncclWindow_t window = NULL;
    void *memory = NULL;
    int host[COUNT];
    if (put == NULL) {
        skipped(self, "one-sided operations");
        return;
    }
    ncclComm_t comm = world(self);
    NCCL(ncclMemAlloc(&memory, 1 << 20));
    NCCL(LOOKUP(ncclCommWindowRegister)(comm, memory, 1 << 20, &window, NCCL_WIN_COLL_SYMMETRIC));
    int peer = 1 - self->rank;
    for (int index = 0; index < COUNT; index++)
        host[index] = 100 * self->rank + index;
    upload(numbers, host, sizeof host);
    ncclResult_t result =
        window == NULL ? ncclInvalidUsage
                       : put(numbers, COUNT, ncclInt32, peer, window, 4096, 0, 0, 0, comm, stream);
    if (result == ncclSuccess) {
        ncclWaitSignalDesc_t wait = {1, peer, 0, 0};
        NCCL(LOOKUP(ncclWaitSignal)(1, &wait, comm, stream));
        finish(stream);
        download(host, (char *)memory + 4096, sizeof host);
        for (int index = 0; index < COUNT; index++)
            REQUIRE(host[index] == 100 * peer + index, "%d", host[index]);
        NCCL(LOOKUP(ncclSignal)(peer, 3, 0, 0, comm, stream));
        wait.sigIdx = 3;
        NCCL(LOOKUP(ncclWaitSignal)(1, &wait, comm, stream));
        finish(stream);
        ok(self, "put into a peer's window, and signals");
    } else if (self->rank == 0) {
        printf("skip one-sided operations: no transport for them (%s)\n", ncclGetLastError(comm));
    }
    barrier(self);
    NCCL(LOOKUP(ncclCommWindowDeregister)(comm, window));
    NCCL(ncclMemFree(memory));
    NCCL(ncclCommDestroy(comm));
}

/* Two streams of one communicator, ordered only by an event and a graph's replay between them. */
static void graphs_and_events(const struct rank *self) {
    ncclComm_t comm = world(self);
    CUgraph graph;
    CUgraphExec executable;
    CUevent event;
    CUstream second = new_stream();
    int result, one = 1;
    CUDA(cuEventCreate(&event, 2 /* no timing */));
    CUDA(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    NCCL(ncclAllReduce(numbers, numbers, 1, ncclInt32, ncclSum, comm, stream));
    CUDA(cuStreamEndCapture(stream, &graph));
    CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
    upload(numbers, &one, sizeof one);
    for (int time = 0; time < 3; time++) {
        CUDA(cuGraphLaunch(executable, stream));
        CUDA(cuEventRecord(event, stream));
        CUDA(cuStreamWaitEvent(second, event, 0));
        NCCL(ncclAllReduce(numbers, numbers, 1, ncclInt32, ncclSum, comm, second));
        CUDA(cuEventRecord(event, second));
        CUDA(cuStreamWaitEvent(stream, event, 0));
    }
    finish(stream);
    download(&result, numbers, sizeof result);
    REQUIRE(result == 64, "%d", result);
    CUDA(cuGraphExecDestroy(executable));
    CUDA(cuGraphDestroy(graph));
    NCCL(ncclCommDestroy(comm));
    CUDA(cuEventDestroy_v2(event));
    CUDA(cuStreamDestroy_v2(second));
    ok(self, "graph launches and plain collectives on two streams, ordered by events");
}

static void body(struct rank *self) {
    stream = new_stream();
    numbers = device_bytes(COUNT * sizeof *numbers);
    revoked(self);
    suspended(self);
    one_sided(self);
    graphs_and_events(self);
}

int main(void) { return run_ranks(2, body, 0); }
