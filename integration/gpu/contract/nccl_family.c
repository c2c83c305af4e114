/* SPDX-License-Identifier: Apache-2.0 */
/* How communicators come from others, and what is refused. */
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

static void split(const struct rank *self, ncclComm_t comm) {
    ncclComm_t pair = NULL, alone = (ncclComm_t)1;
    int told;
    NCCL(ncclCommSplit(comm, self->rank == 0 ? NCCL_SPLIT_NOCOLOR : 7, -self->rank, &pair, NULL));
    REQUIRE((pair == NULL) == (self->rank == 0), "%p", (void *)pair);
    if (pair != NULL) {
        NCCL(ncclCommCount(pair, &told));
        REQUIRE(told == self->count - 1, "%d", told);
        NCCL(ncclCommUserRank(pair, &told));
        REQUIRE(told == self->count - 1 - self->rank, "%d", told);
        REQUIRE(sum(pair, self->rank) == 3, "1 + 2");
        NCCL(ncclCommDestroy(pair));
    }
    NCCL(ncclCommSplit(comm, self->rank, 0, &alone, NULL));
    REQUIRE(sum(alone, 41) == 41, "alone");
    NCCL(ncclCommDestroy(alone));
    ok(self, "split by colour and key; no colour, no communicator");
}

static void shrink(const struct rank *self, ncclComm_t comm) {
    __typeof__(&ncclCommShrink) function = LOOKUP(ncclCommShrink);
    ncclComm_t smaller = NULL;
    int left_out = 1, told;
    if (function == NULL) {
        skipped(self, "shrink");
        return;
    }
    if (self->rank != left_out) {
        NCCL(function(comm, &left_out, 1, &smaller, NULL, NCCL_SHRINK_DEFAULT));
        NCCL(ncclCommUserRank(smaller, &told));
        REQUIRE(told == (self->rank == 0 ? 0 : 1), "%d", told);
        REQUIRE(sum(smaller, self->rank) == 2, "0 + 2");
        NCCL(ncclCommDestroy(smaller));
    }
    barrier(self);
    ok(self, "shrink closes the gap");
}

/* Members 0 and 1 have a communicator; 2 joins behind them. */
static void grow(const struct rank *self) {
    __typeof__(&ncclCommGrow) function = LOOKUP(ncclCommGrow);
    if (function == NULL) {
        skipped(self, "grow");
        return;
    }
    ncclComm_t small = NULL, all = NULL;
    ncclUniqueId id = fresh_id(self, 1, 0);
    if (self->rank < 2)
        NCCL(ncclCommInitRank(&small, 2, id, self->rank));
    if (self->rank == 0)
        NCCL(LOOKUP(ncclCommGetUniqueId)(small, &self->shared->id[2]));
    barrier(self);
    const ncclUniqueId *joining = self->rank == 1 ? NULL : &self->shared->id[2];
    NCCL(function(small, 3, joining, self->rank < 2 ? -1 : 2, &all, NULL));
    REQUIRE(sum(all, self->rank) == 3, "0 + 1 + 2");
    NCCL(ncclCommDestroy(all));
    if (small != NULL)
        NCCL(ncclCommDestroy(small));
    ok(self, "grow keeps ranks and adds behind them");
}

static void several_at_once(const struct rank *self) {
    ncclComm_t comms[3];
    ncclUniqueId ids[3];
    for (int one = 0; one < 3; one++)
        ids[one] = fresh_id(self, one, one);
    NCCL(ncclGroupStart());
    for (int one = 0; one < 3; one++) /* in an order that differs from rank to rank */
        NCCL(ncclCommInitRank(&comms[(one + self->rank) % 3], 3, ids[(one + self->rank) % 3],
                              self->rank));
    NCCL(ncclGroupEnd());
    for (int one = 0; one < 3; one++)
        REQUIRE(sum(comms[one], one) == 3 * one, "%d", one);
    ok(self, "several communicators made in one group, in any order");
    NCCL(ncclGroupStart());
    for (int one = 0; one < 3; one++)
        NCCL(ncclCommFinalize(comms[(one + self->rank) % 3]));
    NCCL(ncclGroupEnd());
    for (int one = 0; one < 3; one++)
        NCCL(ncclCommDestroy(comms[one]));
    ok(self, "and finalized in one group");

    ncclComm_t scalable;
    for (int one = 0; one < 2; one++)
        ids[one] = fresh_id(self, one, one);
    NCCL(ncclCommInitRankScalable(&scalable, 3, self->rank, 2, ids, NULL));
    REQUIRE(sum(scalable, 1) == 3, "scalable");
    NCCL(ncclCommDestroy(scalable));
    ok(self, "a communicator from two ids");

    int device = 0;
    ncclComm_t own;
    NCCL(ncclCommInitAll(&own, 1, &device));
    REQUIRE(sum(own, 9) == 9, "alone");
    NCCL(ncclCommDestroy(own));
    ok(self, "a communicator of one process");
}

/* Built against an older header: a shorter struct, with garbage behind it (nccl#2347). */
static void short_config(const struct rank *self) {
    struct {
        ncclConfig_t config;
        int behind;
    } given = {.config = nccl_config(22604)};
    size_t size = given.config.size;
    memset((char *)&given.config + size, 0xfe, sizeof given - size);
    given.config.maxCTAs = 2;
    ncclComm_t comm;
    NCCL(ncclCommInitRankConfig(&comm, self->count, fresh_id(self, 3, 0), self->rank,
                                &given.config));
    REQUIRE(sum(comm, 1) == self->count, "short config");
    NCCL(ncclCommDestroy(comm));
    given.config.magic = 0;
    EXPECT(ncclInvalidArgument, ncclCommInitRankConfig(&comm, self->count, fresh_id(self, 4, 0),
                                                       self->rank, &given.config));
    ok(self, "of a shorter config only its own bytes are read");
}

static void body(struct rank *self) {
    stream = new_stream();
    number = device_bytes(sizeof *number);
    ncclComm_t comm = world(self);
    split(self, comm);
    shrink(self, comm);
    NCCL(ncclCommDestroy(comm));
    grow(self);
    several_at_once(self);
    short_config(self);
}

int main(void) { return run_ranks(3, body, 0); }
