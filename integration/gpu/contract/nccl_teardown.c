/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What liveshift does to every communicator of a rank: down, nothing left, up again; and what stands
 * in the way: captured graphs, members that died, two ranks on one GPU.
 */
#include "nccl_ranks.h"

static int *number;
static CUstream stream;

static int sum(ncclComm_t comm, int mine) {
    int total;
    upload(number, &mine, sizeof mine);
    NCCL(ncclAllReduce(number, number, 1, ncclInt32, ncclSum, comm, stream));
    finish(stream);
    download(&total, number, sizeof total);
    return total;
}

/* After the last communicator no thread and no socket is left (with RAS off), time after time. */
static void rebuilt(const struct rank *self) {
    int sockets = open_sockets();
    for (int time = 0; time < 3; time++) {
        ncclComm_t comm = world(self), part;
        NCCL(ncclCommSplit(comm, self->rank % 2, 0, &part, NULL));
        REQUIRE(sum(comm, 1) == self->count, "time %d", time);
        REQUIRE(threads_named("NCCL") > 0 && open_sockets() > sockets, "no threads, no sockets?");
        NCCL(ncclCommFinalize(part));
        NCCL(ncclCommFinalize(comm));
        NCCL(ncclCommDestroy(part));
        NCCL(ncclCommDestroy(comm));
        while (threads_named("NCCL Bootstrap") > 0)
            watch(1); /* the root of the unique id ends by itself */
        /* A thread that was joined is in /proc for a moment yet. */
        for (int waited = 0; waited < 1000 && threads_named("NCCL") > 0; waited++)
            watch(1);
        REQUIRE(threads_named("NCCL") == 0, "%d threads left", threads_named("NCCL"));
        REQUIRE(open_sockets() == sockets, "%d sockets, before %d", open_sockets(), sockets);
    }
    ok(self, "torn down and rebuilt three times, nothing left between");
}

static void *destroy(void *argument) {
    NCCL(ncclCommDestroy(argument));
    return NULL;
}

/* pytorch#115388 */
static void graph_holds(const struct rank *self) {
    ncclComm_t comm = world(self);
    CUgraph graph;
    CUgraphExec executable;
    int result, one = 1;
    pthread_t thread;
    CUDA(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    NCCL(ncclAllReduce(number, number, 1, ncclInt32, ncclSum, comm, stream));
    CUDA(cuStreamEndCapture(stream, &graph));
    CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
    upload(number, &one, sizeof one);
    for (int time = 0; time < 3; time++)
        CUDA(cuGraphLaunch(executable, stream));
    finish(stream);
    download(&result, number, sizeof result);
    REQUIRE(result == self->count * self->count * self->count, "%d", result);
    ok(self, "a captured collective runs at each launch of its graph");

    pthread_create(&thread, NULL, destroy, comm);
    watch(100);
    REQUIRE(pthread_tryjoin_np(thread, NULL) != 0, "destroyed beneath a live graph");
    CUDA(cuGraphExecDestroy(executable));
    CUDA(cuGraphDestroy(graph));
    pthread_join(thread, NULL);
    ok(self, "destroying a communicator hangs until the graphs that captured it are gone");
}

static void one_gpu(const struct rank *self) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) { /* exec, so that the library reads its environment anew */
        char rank[8], id[2 * sizeof(ncclUniqueId) + 1];
        snprintf(rank, sizeof rank, "%d", self->rank);
        for (size_t byte = 0; byte < sizeof(ncclUniqueId); byte++)
            snprintf(id + 2 * byte, 3, "%02x", (unsigned char)self->shared->id[5].internal[byte]);
        setenv("NCCL_HOSTID", "the-same", 1);
        execl("/proc/self/exe", "nccl_teardown", rank, id, NULL);
        _exit(127);
    }
    int how;
    waitpid(child, &how, 0);
    REQUIRE(WIFEXITED(how) && WEXITSTATUS(how) == 0, "status %#x", how);
    ok(self, "two ranks with one host id on one GPU are refused");
}

static int duplicate(int rank, const char *hexadecimal) {
    ncclUniqueId id;
    ncclComm_t comm;
    CUcontext context;
    for (size_t byte = 0; byte < sizeof id; byte++)
        sscanf(hexadecimal + 2 * byte, "%2hhx", (unsigned char *)&id.internal[byte]);
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, 0));
    CUDA(cuCtxSetCurrent(context));
    EXPECT(ncclInvalidUsage, ncclCommInitRank(&comm, 2, id, rank));
    return 0;
}

static void death(const struct rank *self) {
    ncclComm_t comm = world(self);
    REQUIRE(sum(comm, 1) == self->count, "all alive");
    if (self->rank != self->count - 1)
        NCCL(ncclAllReduce(number, number, 1, ncclInt32, ncclSum, comm, stream));
    barrier(self);
    if (self->rank == self->count - 1)
        kill(getpid(), SIGKILL);
    ncclResult_t state;
    while ((state = async_error(comm)) == ncclSuccess)
        watch(1);
    REQUIRE(state == ncclRemoteError || state == ncclSystemError, "%d", (int)state);
    REQUIRE(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY, "complete without a dead member");
    NCCL(ncclCommAbort(comm));
    finish(stream);
    ok(self, "a dead member becomes an asynchronous error, and abort ends what hangs");
}

static void body(struct rank *self) {
    stream = new_stream();
    number = device_bytes(sizeof *number);
    rebuilt(self);
    graph_holds(self);
    fresh_id(self, 5, 0);
    one_gpu(self);
    death(self);
}

int main(int count, char **arguments) {
    return count == 3 ? duplicate(atoi(arguments[1]), arguments[2]) : run_ranks(2, body, SIGKILL);
}
