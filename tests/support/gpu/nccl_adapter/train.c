/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small data-parallel training loop that uses every kind of NCCL call: train FOLDER RANK COUNT
 * STEPS. It prints "step N", and at the end "result HASH" of all that it computed. A second thread
 * asks for asynchronous errors all the time, as PyTorch's watchdog does, and ends the program on
 * one.
 */
#include "rank.h"

#define N 1000
#define COMMS 8

static ncclComm_t watched[COMMS];
static pthread_mutex_t watching = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int over;
static unsigned asked;

static void *watchdog(void *unused) {
    (void)unused;
    while (!over) {
        pthread_mutex_lock(&watching);
        for (int i = 0; i < COMMS; i++) {
            ncclResult_t error = ncclSuccess;
            int value = -1;
            if (watched[i] == NULL)
                continue;
            CHECK(ncclCommGetAsyncError(watched[i], &error));
            REQUIRE(error == ncclSuccess, "communicator %d has error %d", i, error);
            CHECK(ncclCommUserRank(watched[i], &value));
            REQUIRE(value >= 0 && value < count, "communicator %d has rank %d", i, value);
            CHECK(ncclCommCount(watched[i], &value));
            REQUIRE(value >= 1 && value <= count, "communicator %d has %d ranks", i, value);
            CHECK(ncclCommCuDevice(watched[i], &value));
            REQUIRE(value == 0, "communicator %d is on device %d", i, value);
            asked++;
        }
        pthread_mutex_unlock(&watching);
        pause_us(2000);
    }
    return NULL;
}

static void watch(int i, ncclComm_t comm) {
    pthread_mutex_lock(&watching);
    watched[i] = comm;
    pthread_mutex_unlock(&watching);
}

/* A second thread with a communicator and a stream of its own. */
struct side {
    ncclComm_t comm;
    int steps;
    uint64_t result;
};

static void *side_thread(void *of) {
    struct side *side = of;
    CHECK(cudaSetDevice(0));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, 1));
    float *data = device_floats(N), host[N];
    for (int i = 0; i < N; i++)
        host[i] = (float)(own + i) / 100;
    CHECK(cudaMemcpyAsync(data, host, sizeof host, cudaMemcpyHostToDevice, stream));
    for (int step = 0; step < side->steps; step++) {
        CHECK(ncclAllReduce(data, data, N, ncclFloat32, ncclAvg, side->comm, stream));
        CHECK(ncclBroadcast(data, data, N / 2, ncclFloat32, step % count, side->comm, stream));
        pause_us(300);
    }
    CHECK(cudaMemcpyAsync(host, data, sizeof host, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    side->result = hash(1, host, sizeof host);
    CHECK(cudaStreamDestroy(stream));
    return NULL;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    int steps = atoi(argv[4]);
    ncclConfig_t config = nccl_config(22907);
    config.commName = "world";
    ncclComm_t world, half, side_world, temporary;
    CHECK(ncclCommInitRankConfig(&world, count, shared_id("world"), own, &config));
    watch(0, world);
    struct side side = {.steps = 3 * steps};
    CHECK(ncclCommInitRank(&side_world, count, shared_id("side"), own));
    side.comm = side_world;
    watch(1, side_world);
    CHECK(ncclCommSplit(world, own % 2, -own, &half, NULL));
    watch(2, half);

    cudaStream_t compute, messages;
    CHECK(cudaStreamCreateWithFlags(&compute, 1));
    CHECK(cudaStreamCreateWithFlags(&messages, 1));
    cudaEvent_t computed;
    CHECK(cudaEventCreate(&computed));
    float *parameters = device_floats(N), *gradients = device_floats(N * (size_t)count);
    float *parts = device_floats(N * (size_t)count), *small = device_floats(N);
    static float host[N], received[N];
    CHECK(cudaMemset(gradients, 0, N * (size_t)count * sizeof(float)));
    CHECK(cudaMemset(parts, 0, N * (size_t)count * sizeof(float)));
    CHECK(cudaMemset(small, 0, N * sizeof(float)));
    for (int i = 0; i < N; i++)
        host[i] = (float)i / N;
    CHECK(cudaMemcpy(parameters, host, sizeof host, cudaMemcpyHostToDevice));
    void *handle;
    CHECK(ncclCommRegister(world, gradients, N * sizeof(float), &handle));
    float scale = 1.0f / (float)count;
    ncclRedOp_t mean;
    CHECK(ncclRedOpCreatePreMulSum(&mean, &scale, ncclFloat32, ncclScalarHostImmediate, world));
    scale = 0; /* the value was NCCL's at the call */

    pthread_t watcher, sider;
    CHECK(pthread_create(&watcher, NULL, watchdog, NULL));
    CHECK(pthread_create(&sider, NULL, side_thread, &side));
    uint64_t result = 14695981039346656037u;
    for (int step = 0; step < steps; step++) {
        /* Averages the gradients of this rank's batch, and updates the parameters. */
        CHECK(cudaMemcpy(host, parameters, sizeof host, cudaMemcpyDeviceToHost));
        for (int i = 0; i < N; i++)
            host[i] = host[i] * 0.5f + (float)((own * 31 + step * 7 + i) % 17) / 16;
        CHECK(cudaMemcpyAsync(gradients, host, sizeof host, cudaMemcpyHostToDevice, compute));
        CHECK(ncclAllReduce(gradients, gradients, N, ncclFloat32, mean, world, compute));
        CHECK(
            cudaMemcpyAsync(received, gradients, sizeof received, cudaMemcpyDeviceToHost, compute));
        CHECK(cudaStreamSynchronize(compute));
        CHECK(cudaMemcpy(host, parameters, sizeof host, cudaMemcpyDeviceToHost));
        for (int i = 0; i < N; i++)
            host[i] -= 0.01f * received[i];
        CHECK(cudaMemcpy(parameters, host, sizeof host, cudaMemcpyHostToDevice));

        /* Does what tensor parallelism does, within a half of the ranks. */
        CHECK(ncclAllGather(parameters, parts, N / 4, ncclFloat32, half, compute));
        CHECK(ncclReduce(parts, small, N / 4, ncclFloat32, ncclMax, 0, half, compute));
        CHECK(cudaEventRecord(computed, compute));
        CHECK(cudaStreamWaitEvent(messages, computed, 0));

        /* A ring in one group, and a pipeline of single calls. */
        int next = (own + 1) % count, before = (own + count - 1) % count;
        CHECK(ncclGroupStart());
        CHECK(ncclSend(parameters, N, ncclFloat32, next, world, messages));
        CHECK(ncclRecv(parts, N, ncclFloat32, before, world, messages));
        CHECK(ncclGroupEnd());
        if (own > 0)
            CHECK(ncclRecv(small, N, ncclFloat32, own - 1, world, messages));
        if (own + 1 < count)
            CHECK(ncclSend(parts, N, ncclFloat32, own + 1, world, messages));
        if (step % 5 == 0) {
            CHECK(ncclGroupStart());
            CHECK(ncclReduceScatter(parts, small, N / 4, ncclFloat32, ncclSum, world, messages));
            CHECK(ncclGroupStart());
            CHECK(ncclAllGather(small, gradients, N / 4, ncclFloat32, world, messages));
            CHECK(ncclGroupEnd());
            CHECK(ncclGroupEnd());
        }
        if (step % 20 == 10) { /* a communicator that exists only for a moment */
            CHECK(
                ncclCommSplit(world, step % 40 == 10 && own == 0 ? -1 : 0, own, &temporary, NULL));
            REQUIRE((temporary == NULL) == (step % 40 == 10 && own == 0), "%p", (void *)temporary);
            if (temporary != NULL) {
                watch(3, temporary);
                CHECK(ncclAllReduce(parts, parts, 10, ncclFloat32, ncclSum, temporary, messages));
                CHECK(cudaStreamSynchronize(messages));
                watch(3, NULL);
                CHECK(ncclCommDestroy(temporary));
            }
        }
        CHECK(cudaMemcpyAsync(received, small, sizeof received, cudaMemcpyDeviceToHost, messages));
        CHECK(cudaStreamSynchronize(messages));
        result = hash(result, received, sizeof received);
        CHECK(cudaStreamSynchronize(compute));
        printf("step %d\n", step);
        pause_us(1000);
    }
    CHECK(pthread_join(sider, NULL));
    CHECK(cudaMemcpy(host, parameters, sizeof host, cudaMemcpyDeviceToHost));
    result = hash(hash(result, host, sizeof host), &side.result, sizeof side.result);
    over = 1;
    CHECK(pthread_join(watcher, NULL));
    REQUIRE(asked > 0, "the watchdog asked nothing");
    CHECK(ncclRedOpDestroy(mean, world));
    CHECK(ncclCommDeregister(world, handle));
    CHECK(ncclCommDestroy(half));
    CHECK(ncclCommDestroy(side_world));
    CHECK(ncclCommFinalize(world));
    CHECK(ncclCommDestroy(world));
    printf("result %016llx\n", (unsigned long long)result);
    return 0;
}
