/* SPDX-License-Identifier: Apache-2.0 */
/* What every collective computes: kinds, types, operators, in place, in groups, on several streams. */
#include "nccl_ranks.h"

#define COUNT 1000

static float host[MAX_RANKS * COUNT], back[MAX_RANKS * COUNT];
static float *sent, *received;
static CUstream stream;
static ncclComm_t comm;

/* Small whole numbers: sums are exact in any order, so the real library agrees to the bit. */
static float value(int rank, int index) { return (float)((rank + 1) * 3 + index % 17); }

static void fill(int rank, int count) {
    for (int index = 0; index < count; index++)
        host[index] = value(rank, index);
    upload(sent, host, (size_t)count * sizeof *host);
    memset(back, 0xff, sizeof back);
    upload(received, back, sizeof back);
}

static void fetch(int count) {
    finish(stream);
    download(back, received, (size_t)count * sizeof *back);
}

static void all_reduce(const struct rank *self) {
    static const struct {
        ncclRedOp_t op;
        const char *name;
    } ops[] = {
        {ncclSum, "sum"}, {ncclMax, "max"}, {ncclMin, "min"}, {ncclProd, "prod"}, {ncclAvg, "avg"}};
    for (size_t one = 0; one < sizeof ops / sizeof *ops; one++) {
        fill(self->rank, COUNT);
        NCCL(ncclAllReduce(sent, received, COUNT, ncclFloat32, ops[one].op, comm, stream));
        fetch(COUNT);
        for (int index = 0; index < COUNT; index++) {
            float wanted = value(0, index);
            for (int rank = 1; rank < self->count; rank++) {
                float next = value(rank, index);
                wanted = ops[one].op == ncclProd  ? wanted * next
                         : ops[one].op == ncclMax ? (next > wanted ? next : wanted)
                         : ops[one].op == ncclMin ? (next < wanted ? next : wanted)
                                                  : wanted + next;
            }
            float difference =
                back[index] - (ops[one].op == ncclAvg ? wanted / (float)self->count : wanted);
            REQUIRE(difference < 1e-4f && difference > -1e-4f, "%s [%d] off by %g", ops[one].name,
                    index, (double)difference);
        }
    }
    ok(self, "all-reduce: sum, max, min, prod, avg of floats");
}

static uint16_t bf16(int number) {
    union {
        float number;
        uint32_t bits;
    } word = {.number = (float)number};
    return (uint16_t)(word.bits >> 16);
}

static uint16_t half(int number) {
    int exponent = 31 - __builtin_clz((unsigned)number);
    return (uint16_t)((exponent + 15) << 10 | ((number << 10 >> exponent) & 0x3ff));
}

static void types(const struct rank *self) {
    int total = self->count * (self->count + 1) / 2, mine = self->rank + 1;
    static const struct {
        ncclDataType_t type;
        size_t size;
    } all[] = {{ncclInt8, 1},    {ncclUint8, 1},  {ncclInt32, 4},   {ncclUint32, 4},
               {ncclInt64, 8},   {ncclUint64, 8}, {ncclFloat16, 2}, {ncclBfloat16, 2},
               {ncclFloat32, 4}, {ncclFloat64, 8}};
    for (size_t one = 0; one < sizeof all / sizeof *all; one++) {
        unsigned char element[8] = {0}, wanted[8] = {0};
        for (int which = 0; which < 2; which++) {
            int number = which ? total : mine;
            void *into = which ? wanted : element;
            if (all[one].type == ncclFloat32)
                *(float *)into = (float)number;
            else if (all[one].type == ncclFloat64)
                *(double *)into = number;
            else if (all[one].type == ncclFloat16)
                *(uint16_t *)into = half(number);
            else if (all[one].type == ncclBfloat16)
                *(uint16_t *)into = bf16(number);
            else
                *(int64_t *)into = number; /* little endian */
        }
        upload(sent, element, all[one].size);
        NCCL(ncclAllReduce(sent, received, 1, all[one].type, ncclSum, comm, stream));
        finish(stream);
        download(element, received, all[one].size);
        REQUIRE(memcmp(element, wanted, all[one].size) == 0, "type %d", (int)all[one].type);
    }
    ok(self, "sums of every type of number");
}

static void others(const struct rank *self) {
    int last = self->count - 1;
    fill(self->rank, COUNT);
    NCCL(ncclBroadcast(sent, received, COUNT, ncclFloat32, last, comm, stream));
    fetch(COUNT);
    REQUIRE(back[5] == value(last, 5), "%g", (double)back[5]);
    NCCL(ncclBcast(sent, COUNT, ncclFloat32, last, comm, stream));
    finish(stream);
    download(back, sent, COUNT * sizeof *back);
    REQUIRE(back[6] == value(last, 6), "%g", (double)back[6]);
    ok(self, "broadcast, and in place");

    fill(self->rank, COUNT);
    NCCL(ncclReduce(sent, received, COUNT, ncclFloat32, ncclMax, 0, comm, stream));
    fetch(COUNT);
    REQUIRE(self->rank != 0 || back[7] == value(last, 7), "%g", (double)back[7]);
    ok(self, "reduce to one");

    fill(self->rank, COUNT);
    NCCL(ncclAllGather(sent, received, COUNT, ncclFloat32, comm, stream));
    fetch(self->count * COUNT);
    for (int rank = 0; rank < self->count; rank++)
        REQUIRE(back[rank * COUNT + 8] == value(rank, 8), "of %d: %g", rank,
                (double)back[rank * COUNT + 8]);
    ok(self, "all-gather");

    fill(self->rank, self->count * COUNT);
    NCCL(ncclReduceScatter(sent, received, COUNT, ncclFloat32, ncclMin, comm, stream));
    fetch(COUNT);
    REQUIRE(back[9] == value(0, self->rank * COUNT + 9), "%g", (double)back[9]);
    ok(self, "reduce-scatter");

    fill(self->rank, COUNT);
    NCCL(ncclAllReduce(sent, sent, COUNT, ncclFloat32, ncclMax, comm, stream));
    finish(stream);
    download(back, sent, COUNT * sizeof *back);
    REQUIRE(back[10] == value(last, 10), "%g", (double)back[10]);
    ok(self, "all-reduce in place");
    NCCL(ncclAllReduce(sent, received, 0, ncclFloat32, ncclSum, comm, stream));
    finish(stream);
    ok(self, "an empty collective");
}

static void newer(const struct rank *self) {
    __typeof__(&ncclAlltoAll) all_to_all = LOOKUP(ncclAlltoAll);
    __typeof__(&ncclGather) gather = LOOKUP(ncclGather);
    __typeof__(&ncclScatter) scatter = LOOKUP(ncclScatter);
    if (all_to_all == NULL) {
        skipped(self, "all-to-all, gather, scatter");
        return;
    }
    fill(self->rank, self->count * COUNT);
    NCCL(all_to_all(sent, received, COUNT, ncclFloat32, comm, stream));
    fetch(self->count * COUNT);
    for (int rank = 0; rank < self->count; rank++)
        REQUIRE(back[rank * COUNT + 3] == value(rank, self->rank * COUNT + 3), "of %d", rank);
    fill(self->rank, COUNT);
    NCCL(gather(sent, received, COUNT, ncclFloat32, 1, comm, stream));
    fetch(self->count * COUNT);
    for (int rank = 0; self->rank == 1 && rank < self->count; rank++)
        REQUIRE(back[rank * COUNT + 4] == value(rank, 4), "of %d", rank);
    fill(self->rank, self->count * COUNT);
    NCCL(scatter(sent, received, COUNT, ncclFloat32, 1, comm, stream));
    fetch(COUNT);
    REQUIRE(back[5] == value(1, self->rank * COUNT + 5), "%g", (double)back[5]);
    ok(self, "all-to-all, gather, scatter");
    __typeof__(&ncclAllReduceConfig) configured = LOOKUP(ncclAllReduceConfig);
    if (configured == NULL) {
        skipped(self, "a collective with a config of its own");
        return;
    }
    ncclCollConfig_t config = nccl_coll_config(self->version);
    fill(self->rank, COUNT);
    NCCL(configured(sent, received, COUNT, ncclFloat32, ncclMax, comm, stream, &config));
    fetch(COUNT);
    REQUIRE(back[1] == value(self->count - 1, 1), "%g", (double)back[1]);
    config.magic = 0;
    EXPECT(ncclInvalidArgument,
           configured(sent, received, COUNT, ncclFloat32, ncclMax, comm, stream, &config));
    ok(self, "a collective with a config of its own");
}

/* Every rank to every other, one group: no order of sends and receives may deadlock. */
static void point_to_point(const struct rank *self) {
    fill(self->rank, self->count * COUNT);
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < self->count; peer++) {
        NCCL(ncclSend(sent + peer * COUNT, COUNT, ncclFloat32, peer, comm, stream));
        NCCL(ncclRecv(received + peer * COUNT, COUNT, ncclFloat32, peer, comm, stream));
    }
    NCCL(ncclGroupEnd());
    fetch(self->count * COUNT);
    for (int rank = 0; rank < self->count; rank++)
        REQUIRE(back[rank * COUNT + 2] == value(rank, self->rank * COUNT + 2), "from %d", rank);
    ok(self, "sends and receives in one group");

    int next = (self->rank + 1) % self->count,
        previous = (self->rank + self->count - 1) % self->count;
    if (self->rank % 2 == 0) {
        NCCL(ncclSend(sent, COUNT, ncclFloat32, next, comm, stream));
        NCCL(ncclRecv(received, COUNT, ncclFloat32, previous, comm, stream));
    } else {
        NCCL(ncclRecv(received, COUNT, ncclFloat32, previous, comm, stream));
        NCCL(ncclSend(sent, COUNT, ncclFloat32, next, comm, stream));
    }
    fetch(COUNT);
    REQUIRE(back[11] == value(previous, 11), "%g", (double)back[11]);
    ok(self, "a send and a receive after each other");
}

static void groups(const struct rank *self) {
    CUstream second = new_stream();
    float *more = device_bytes(COUNT * sizeof *more);
    fill(self->rank, COUNT);
    NCCL(ncclGroupStart());
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(sent, received, COUNT, ncclFloat32, ncclMax, comm, stream));
    NCCL(ncclGroupEnd());
    NCCL(ncclAllReduce(sent, more, COUNT, ncclFloat32, ncclMin, comm, second));
    NCCL(ncclGroupEnd());
    fetch(COUNT);
    REQUIRE(back[3] == value(self->count - 1, 3), "%g", (double)back[3]);
    finish(second);
    download(back, more, COUNT * sizeof *back);
    REQUIRE(back[3] == value(0, 3), "%g", (double)back[3]);
    ok(self, "a nested group on two streams");

    NCCL(ncclGroupStart());
    EXPECT(ncclInvalidArgument,
           ncclAllReduce(sent, received, COUNT, ncclNumTypes, ncclMax, comm, stream));
    EXPECT(ncclInvalidArgument, ncclGroupEnd());
    EXPECT(ncclInvalidUsage, ncclGroupEnd());
    EXPECT(ncclInvalidArgument,
           ncclBroadcast(sent, received, COUNT, ncclFloat32, self->count, comm, stream));
    ok(self, "errors of a group come at its end");
    device_free(more);
    CUDA(cuStreamDestroy_v2(second));
}

static void operators(const struct rank *self) {
    float factor = (float)(self->rank + 2);
    void *in_memory = device_bytes(sizeof factor);
    ncclRedOp_t immediate, later;
    upload(in_memory, &factor, sizeof factor);
    NCCL(ncclRedOpCreatePreMulSum(&immediate, &factor, ncclFloat32, ncclScalarHostImmediate, comm));
    NCCL(ncclRedOpCreatePreMulSum(&later, in_memory, ncclFloat32, ncclScalarDevice, comm));
    for (int which = 0; which < 2; which++) {
        fill(self->rank, COUNT);
        NCCL(ncclAllReduce(sent, received, COUNT, ncclFloat32, which ? later : immediate, comm,
                           stream));
        fetch(COUNT);
        for (int index = 0; index < COUNT; index++) {
            float wanted = 0;
            for (int rank = 0; rank < self->count; rank++)
                wanted += value(rank, index) * (float)(rank + 2);
            REQUIRE(back[index] == wanted, "%d: %g not %g", index, (double)back[index],
                    (double)wanted);
        }
    }
    NCCL(ncclRedOpDestroy(immediate, comm));
    NCCL(ncclRedOpDestroy(later, comm));
    EXPECT(ncclInvalidArgument, ncclRedOpDestroy(later, comm));
    device_free(in_memory);
    ok(self, "operators that multiply first");
}

static void registrations(const struct rank *self) {
    void *handle = NULL;
    NCCL(ncclCommRegister(comm, sent, sizeof host, &handle));
    fill(self->rank, COUNT);
    NCCL(ncclAllReduce(sent, received, COUNT, ncclFloat32, ncclMax, comm, stream));
    fetch(COUNT);
    NCCL(ncclCommDeregister(comm, handle));
    void *memory = NULL;
    NCCL(ncclMemAlloc(&memory, 1 << 20));
    __typeof__(&ncclCommWindowRegister) window_register = LOOKUP(ncclCommWindowRegister);
    if (window_register != NULL) {
        ncclWindow_t window = NULL;
        NCCL(window_register(comm, memory, 1 << 20, &window, NCCL_WIN_DEFAULT));
        NCCL(LOOKUP(ncclCommWindowDeregister)(comm, window));
    } else {
        skipped(self, "windows");
    }
    NCCL(ncclMemFree(memory));
    ok(self, "buffers and windows registered");
}

static void body(struct rank *self) {
    int told;
    stream = new_stream();
    sent = device_bytes(sizeof host);
    received = device_bytes(sizeof host);
    comm = world(self);
    NCCL(ncclCommCount(comm, &told));
    REQUIRE(told == self->count, "%d", told);
    NCCL(ncclCommUserRank(comm, &told));
    REQUIRE(told == self->rank, "%d", told);
    NCCL(ncclCommCuDevice(comm, &told));
    REQUIRE(told == 0, "%d", told);
    all_reduce(self);
    types(self);
    others(self);
    newer(self);
    point_to_point(self);
    groups(self);
    operators(self);
    registrations(self);
    REQUIRE(async_error(comm) == ncclSuccess, "%d", (int)async_error(comm));
    NCCL(ncclCommFinalize(comm));
    NCCL(ncclCommDestroy(comm));
    ok(self, "finalized and destroyed");
}

int main(void) { return run_ranks(2, body, 0); }
