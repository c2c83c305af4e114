/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the simulated NCCL is stricter than the real one, or must be made to show a trap: what a
 * wrong interposer or a wrong test would run into. The real one would hang or go astray at some.
 */
#include "nccl_ranks.h"

static int *numbers;
static CUstream stream;

static void foreign_handles(const struct rank *self) {
    int made_up, told;
    EXPECT(ncclInvalidArgument, ncclCommUserRank((ncclComm_t)&made_up, &told));
    EXPECT(ncclInvalidArgument,
           ncclAllReduce(numbers, numbers, 1, ncclInt32, ncclSum, (ncclComm_t)&made_up, stream));
    ncclComm_t comm = world(self);
    NCCL(ncclCommDestroy(comm));
    EXPECT(ncclInvalidArgument, ncclCommDestroy(comm));
    ok(self, "a handle that is no live communicator is refused");
}

static void operators_are_of_one_communicator(const struct rank *self) {
    ncclComm_t first = world(self), second = world(self);
    ncclRedOp_t one, two;
    int factor = 2;
    NCCL(ncclRedOpCreatePreMulSum(&one, &factor, ncclInt32, ncclScalarHostImmediate, first));
    NCCL(ncclRedOpCreatePreMulSum(&two, &factor, ncclInt32, ncclScalarHostImmediate, second));
    REQUIRE(one != two, "%d", (int)one);
    EXPECT(ncclInvalidArgument, ncclAllReduce(numbers, numbers, 1, ncclInt32, one, second, stream));
    NCCL(ncclCommDestroy(first));
    NCCL(ncclCommDestroy(second));
    ok(self, "an operator's value holds for its communicator only");
}

static void mixed_group(const struct rank *self) {
    ncclComm_t comm = world(self), more = NULL;
    ncclUniqueId id = fresh_id(self, 1, 0);
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(numbers, numbers, 1, ncclInt32, ncclSum, comm, stream));
    NCCL(ncclCommInitRank(&more, self->count, id, self->rank));
    EXPECT(ncclInvalidUsage, ncclGroupEnd());
    REQUIRE(more == NULL, "made after all");
    NCCL(ncclAllReduce(numbers, numbers, 1, ncclInt32, ncclSum, comm, stream));
    finish(stream);
    EXPECT(ncclInvalidUsage, ncclSend(numbers, 1, ncclInt32, self->rank, comm, stream));
    NCCL(ncclCommDestroy(comm));
    ok(self, "creations and operations in one group are refused, and a lone send to oneself");
}

static void mismatch(const struct rank *self) {
    ncclComm_t comm = world(self);
    NCCL(ncclAllReduce(numbers, numbers, 1 + (size_t)self->rank, ncclInt32, ncclSum, comm, stream));
    finish(stream);
    REQUIRE(async_error(comm) == ncclInvalidUsage, "%d", (int)async_error(comm));
    REQUIRE(strstr(ncclGetLastError(comm), "collective 0 of communicator") != NULL, "%s",
            ncclGetLastError(comm));
    barrier(self); /* an abort is an error of its own to the others */
    NCCL(ncclCommAbort(comm));
    ok(self, "members that call different things are told so");
}

/* A send completes when the receiver has come, however small it is. */
static void send_waits(const struct rank *self) {
    ncclComm_t comm = world(self);
    if (self->rank == 0) {
        NCCL(ncclSend(numbers, 1, ncclInt32, 1, comm, stream));
        watch(50);
        REQUIRE(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY, "sent to nobody");
    }
    barrier(self);
    if (self->rank == 1)
        NCCL(ncclRecv(numbers, 1, ncclInt32, 0, comm, stream));
    finish(stream);
    NCCL(ncclCommDestroy(comm));
    ok(self, "a send hangs until the receiver has come");
}

static void *destroy(void *argument) {
    NCCL(ncclCommDestroy(argument));
    return NULL;
}

static void destroy_waits(const struct rank *self) {
    ncclComm_t comm = world(self);
    pthread_t thread;
    if (self->rank == 0) {
        pthread_create(&thread, NULL, destroy, comm);
        watch(50);
        REQUIRE(pthread_tryjoin_np(thread, NULL) != 0, "destroyed alone");
    }
    barrier(self);
    if (self->rank == 0)
        pthread_join(thread, NULL);
    else
        NCCL(ncclCommDestroy(comm));
    ok(self, "destroying hangs until all members destroy");
}

/* nccl#2348: what was read once stays, whatever the environment says later. */
static void statics(const struct rank *self) {
    char before[16];
    snprintf(before, sizeof before, "%s", getenv("NCCL_HOSTID"));
    setenv("NCCL_HOSTID", "all-the-same", 1);
    setenv("NCCL_SOCKET_IFNAME", "no-such-interface", 1);
    ncclComm_t comm = world(self); /* with a host hash read anew: a duplicate GPU */
    NCCL(ncclCommDestroy(comm));
    setenv("NCCL_HOSTID", before, 1);
    ok(self, "host hash and interface are those of the first use");
}

static void ras(const struct rank *self) {
    while (threads_named("NCCL Bootstrap") > 0)
        watch(1);
    REQUIRE(threads_named("NCCL") == 1 && threads_named("NCCL RAS") == 1, "%d",
            threads_named("NCCL"));
    ok(self, "with RAS on its thread outlives the communicators");
}

static void body(struct rank *self) {
    bool with_ras = getenv("WITH_RAS") != NULL;
    stream = new_stream();
    numbers = device_bytes(16 * sizeof *numbers);
    foreign_handles(self);
    operators_are_of_one_communicator(self);
    if (with_ras) {
        ras(self);
        return;
    }
    mismatch(self);
    send_waits(self);
    destroy_waits(self);
    statics(self);
    mixed_group(self);
}

int main(void) {
    if (getenv("WITH_RAS") != NULL)
        setenv("NCCL_RAS_ENABLE", "1", 1);
    return run_ranks(2, body, 0);
}
