/* SPDX-License-Identifier: Apache-2.0 */
/* The rule: a call returns at once, and its work completes when all members have come. */
#include "nccl_ranks.h"

#define COUNT 1024

static int *numbers;
static CUstream stream;

static void put(int number) {
    static int host[COUNT];
    for (int index = 0; index < COUNT; index++)
        host[index] = number;
    upload(numbers, host, sizeof host);
}

static int first(void) {
    int number;
    download(&number, numbers, sizeof number);
    return number;
}

static void collective_waits(const struct rank *self, ncclComm_t comm) {
    for (int late = 0; late < self->count; late++) {
        put(1);
        if (self->rank != late) {
            NCCL(ncclAllReduce(numbers, numbers, COUNT, ncclInt32, ncclSum, comm, stream));
            watch(50);
            REQUIRE(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY, "without rank %d", late);
        }
        barrier(self);
        if (self->rank == late)
            NCCL(ncclAllReduce(numbers, numbers, COUNT, ncclInt32, ncclSum, comm, stream));
        finish(stream);
        REQUIRE(first() == self->count, "%d", first());
    }
    ok(self, "a collective hangs until the last member has come");
}

/* The first operation between two ranks also connects them, for which the call waits for the other:
   with both at it, that is over. */
static void connect_both(const struct rank *self, ncclComm_t comm) {
    if (self->rank == 0)
        NCCL(ncclSend(numbers, COUNT, ncclInt32, 1, comm, stream));
    else
        NCCL(ncclRecv(numbers, COUNT, ncclInt32, 0, comm, stream));
    finish(stream);
}

static void receive_waits(const struct rank *self, ncclComm_t comm) {
    connect_both(self, comm);
    put(self->rank + 5);
    if (self->rank == 1) {
        NCCL(ncclRecv(numbers, COUNT, ncclInt32, 0, comm, stream));
        watch(50);
        REQUIRE(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY, "received what was not sent");
    }
    barrier(self);
    if (self->rank == 0)
        NCCL(ncclSend(numbers, COUNT, ncclInt32, 1, comm, stream));
    finish(stream);
    REQUIRE(self->rank != 1 || first() == 5, "%d", first());
    ok(self, "a receive hangs until the sender has come");
}

static void order_in_stream(const struct rank *self, ncclComm_t comm) {
    put(1);
    for (int time = 0; time < 10; time++)
        NCCL(ncclAllReduce(numbers, numbers, COUNT, ncclInt32, ncclSum, comm, stream));
    finish(stream);
    int wanted = 1;
    for (int time = 0; time < 10; time++)
        wanted *= self->count;
    REQUIRE(first() == wanted, "%d", first());
    ok(self, "operations of a stream follow each other");
}

/* Across ranks the two communicators are used in different orders, each on a stream of its own. */
static void independent_communicators(const struct rank *self, ncclComm_t comm) {
    ncclComm_t other;
    CUstream another = new_stream();
    int *more = device_bytes(COUNT * sizeof *more);
    NCCL(ncclCommInitRank(&other, self->count, fresh_id(self, 1, self->count - 1), self->rank));
    put(1);
    CUDA(cuMemcpyDtoD_v2((CUdeviceptr)more, (CUdeviceptr)numbers, COUNT * sizeof *more));
    for (int which = 0; which < 2; which++)
        if ((which ^ self->rank) & 1)
            NCCL(ncclAllReduce(numbers, numbers, COUNT, ncclInt32, ncclSum, comm, stream));
        else
            NCCL(ncclAllReduce(more, more, COUNT, ncclInt32, ncclSum, other, another));
    finish(stream);
    finish(another);
    REQUIRE(first() == self->count, "%d", first());
    NCCL(ncclCommDestroy(other));
    device_free(more);
    CUDA(cuStreamDestroy_v2(another));
    ok(self, "communicators don't wait for each other");
}

static void abort_ends_it(const struct rank *self) {
    ncclComm_t comm = world(self);
    if (self->rank == 0)
        NCCL(ncclAllReduce(numbers, numbers, COUNT, ncclInt32, ncclSum, comm, stream));
    barrier(self);
    NCCL(ncclCommAbort(comm));
    finish(stream);
    ok(self, "abort ends a collective that hangs");
}

static void non_blocking(const struct rank *self) {
    ncclConfig_t config = nccl_config(self->version);
    ncclComm_t comm = NULL, half = NULL;
    config.blocking = 0;
    ncclUniqueId id = fresh_id(self, 2, 0);
    if (self->rank == 0) {
        ncclResult_t result = ncclCommInitRankConfig(&comm, self->count, id, 0, &config);
        REQUIRE(result == ncclInProgress && comm != NULL, "%d", (int)result);
        watch(50);
        REQUIRE(async_error(comm) == ncclInProgress, "made without rank 1");
    }
    barrier(self);
    if (self->rank != 0)
        EXPECT(ncclInProgress, ncclCommInitRankConfig(&comm, self->count, id, self->rank, &config));
    REQUIRE(settled(comm) == ncclSuccess, "%s", ncclGetLastError(comm));
    ncclResult_t result = ncclCommSplit(comm, 0, -self->rank, &half, NULL);
    REQUIRE(result == ncclInProgress || result == ncclSuccess, "%d", (int)result);
    REQUIRE(settled(comm) == ncclSuccess && settled(half) == ncclSuccess, "split");
    int rank;
    NCCL(ncclCommUserRank(half, &rank));
    REQUIRE(rank == self->count - 1 - self->rank, "%d", rank);
    put(1);
    result = ncclAllReduce(numbers, numbers, COUNT, ncclInt32, ncclSum, half, stream);
    REQUIRE(result == ncclSuccess || result == ncclInProgress, "%d", (int)result);
    REQUIRE(settled(half) == ncclSuccess, "all-reduce");
    finish(stream);
    REQUIRE(first() == self->count, "%d", first());
    for (int which = 0; which < 2; which++) {
        result = ncclCommFinalize(which ? comm : half);
        REQUIRE(result == ncclInProgress || result == ncclSuccess, "%d", (int)result);
        REQUIRE(settled(which ? comm : half) == ncclSuccess, "finalize");
        result = ncclCommDestroy(which ? comm : half);
        REQUIRE(result == ncclInProgress || result == ncclSuccess, "%d", (int)result);
    }
    ok(self, "a non-blocking communicator tells of its progress");
}

static void body(struct rank *self) {
    stream = new_stream();
    numbers = device_bytes(COUNT * sizeof *numbers);
    ncclComm_t comm = world(self);
    collective_waits(self, comm);
    receive_waits(self, comm);
    order_in_stream(self, comm);
    independent_communicators(self, comm);
    NCCL(ncclCommDestroy(comm));
    abort_ends_it(self);
    non_blocking(self);
}

int main(void) { return run_ranks(2, body, 0); }
