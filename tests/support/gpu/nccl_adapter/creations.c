/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes communicators in every way that NCCL has, and uses them again and again: creations FOLDER
 * RANK COUNT STEPS. It needs two devices and NCCL 2.29 or later. Prints "made", "step N", "ending"
 * and "result HASH". After "ending" it destroys them, the newest first.
 */
#include "rank.h"

#define N 256
#define MAX_COMMS 9

static ncclComm_t comms[MAX_COMMS];
static int used;
static cudaStream_t stream;
static float *data;

static void await(ncclComm_t comm, ncclResult_t result) {
    while (result == ncclInProgress) {
        CHECK(ncclCommGetAsyncError(comm, &result));
        pause_us(200);
    }
    CHECK(result);
}

static void add(ncclComm_t comm) {
    REQUIRE(comm != NULL, "communicator %d", used);
    comms[used++] = comm;
}

/* All ranks but the last shrink the communicator; then the last one joins by a grow. */
static void shrink_and_grow(ncclComm_t parent) {
    int last = count - 1;
    ncclComm_t smaller = NULL, grown;
    ncclUniqueId id;
    if (own != last) {
        CHECK(ncclCommShrink(parent, &last, 1, &smaller, NULL, NCCL_SHRINK_DEFAULT));
        add(smaller);
    }
    if (own == 0)
        CHECK(ncclCommGetUniqueId(smaller, &id));
    share("grow", 0, &id, sizeof id);
    ncclConfig_t config = nccl_config(22907);
    CHECK(ncclCommGrow(smaller, count, own == last || own == 0 ? &id : NULL,
                       own == last ? last : -1, &grown, own == last ? &config : NULL));
    add(grown);
}

static void make_all(void) {
    ncclComm_t comm, other;
    ncclUniqueId ids[2];
    for (int i = 0; i < 2; i++) {
        char name[32];
        snprintf(name, sizeof name, "scalable%d", i);
        if (own == i)
            CHECK(ncclGetUniqueId(&ids[i]));
        share(name, i, &ids[i], sizeof ids[i]);
    }
    ncclConfig_t config = nccl_config(22604); /* shorter than the structure that the library has */
    CHECK(ncclCommInitRankScalable(&comm, count, own, 2, ids, &config));
    add(comm);
    shrink_and_grow(comm);

    config = nccl_config(22907);
    config.blocking = 0;
    config.commName = "waits for nobody";
    await(comm, ncclCommInitRankConfig(&comm, count, shared_id("nonblocking"), own, &config));
    REQUIRE(comm != NULL, "non-blocking");
    await(comm, ncclInProgress);
    add(comm);

    /* Its children: this rank is a member of one and not of the other. A child is complete when the
       parent reports that. */
    ncclComm_t part, none;
    CHECK(ncclCommSplit(comm, 0, own, &part, NULL));
    await(comm, ncclInProgress);
    await(part, ncclInProgress);
    add(part);
    CHECK(ncclCommSplit(comm, own == 0 ? 0 : NCCL_SPLIT_NOCOLOR, own, &none, NULL));
    await(comm, ncclInProgress);
    REQUIRE((none != NULL) == (own == 0), "%p", (void *)none);
    if (own == 0) {
        await(none, ncclInProgress);
        await(none, ncclCommFinalize(none));
        CHECK(ncclCommDestroy(none));
    }

    ncclUniqueId one = shared_id("grouped1"), two = shared_id("grouped2");
    CHECK(ncclGroupStart());
    if (own % 2 == 0)
        CHECK(ncclCommInitRank(&comm, count, one, own));
    CHECK(ncclCommInitRank(&other, count, two, count - 1 - own));
    if (own % 2 == 1)
        CHECK(ncclCommInitRank(&comm, count, one, own));
    CHECK(ncclGroupEnd());
    add(comm);
    add(other);
}

int main(int argc, char **argv) {
    begin(argc, argv);
    int steps = atoi(argv[4]);
    CHECK(cudaStreamCreateWithFlags(&stream, 1));
    data = device_floats(N);
    float *factor = device_floats(1), host[N], half = 0.5f;
    for (int i = 0; i < N; i++)
        host[i] = (float)(own * N + i) / 1000;
    CHECK(cudaMemcpy(data, host, sizeof host, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(factor, &half, sizeof half, cudaMemcpyHostToDevice));
    make_all();

    /* One process is two ranks, each with its own device. */
    ncclComm_t pair[2];
    cudaStream_t streams[2];
    float *values[2];
    CHECK(ncclCommInitAll(pair, 2, NULL));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i));
        CHECK(cudaStreamCreateWithFlags(&streams[i], 1));
        values[i] = device_floats(N);
        CHECK(cudaMemcpy(values[i], host, sizeof host, cudaMemcpyHostToDevice));
    }
    CHECK(cudaSetDevice(0));

    ncclRedOp_t halves;
    CHECK(ncclRedOpCreatePreMulSum(&halves, factor, ncclFloat32, ncclScalarDevice, comms[0]));
    ncclWindow_t window;
    CHECK(ncclCommWindowRegister(comms[0], data, N * sizeof(float), &window, 0));
    printf("made\n");
    for (int step = 0; step < steps; step++) {
        CHECK(ncclAllReduce(data, data, N, ncclFloat32, halves, comms[0], stream));
        for (int i = 1; i < used; i++)
            await(comms[i], ncclAllReduce(data, data, N, ncclFloat32, ncclAvg, comms[i], stream));
        CHECK(ncclGroupStart());
        for (int i = 0; i < 2; i++)
            CHECK(ncclAllReduce(values[i], values[i], N, ncclFloat32, i ? ncclAvg : ncclAvg,
                                pair[i], streams[i]));
        CHECK(ncclGroupEnd());
        CHECK(cudaStreamSynchronize(stream));
        if (step % 10 == 5) {
            CHECK(ncclCommWindowDeregister(comms[0], window));
            CHECK(ncclCommWindowRegister(comms[0], data, N * sizeof(float), &window, 0));
        }
        printf("step %d\n", step);
        pause_us(1000);
    }
    CHECK(cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    uint64_t result = hash(1, host, sizeof host);
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamSynchronize(streams[i]));
        CHECK(cudaMemcpy(host, values[i], sizeof host, cudaMemcpyDeviceToHost));
        result = hash(result, host, sizeof host);
    }
    printf("ending\n");
    CHECK(ncclCommWindowDeregister(comms[0], window));
    CHECK(ncclRedOpDestroy(halves, comms[0]));
    CHECK(ncclGroupStart());
    for (int i = 0; i < 2; i++)
        CHECK(ncclCommDestroy(pair[i]));
    CHECK(ncclGroupEnd());
    while (used-- > 0)
        await(comms[used], ncclCommDestroy(comms[used]) == ncclInProgress ? 0 : 0);
    printf("result %016llx\n", (unsigned long long)result);
    return 0;
}
