/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's exported operations: collectives, point-to-point, one-sided. */

#include "exported.h"
#include "nccl_calls.h"

/* Defines ncclX and declares it before, as -Wmissing-prototypes wants of what no header declares. */
#define API(name, ...)                                                                             \
    EXPORTED ncclResult_t nccl##name(__VA_ARGS__);                                                 \
    ncclResult_t nccl##name(__VA_ARGS__)

#define PASS(name, counted, ...)                                                                   \
    struct nccl_call call = {.function = NCCL_DO_##name,                                           \
                             .kind = NCCL_##counted,                                               \
                             .comm = comm,                                                         \
                             .stream = stream,                                                     \
                             __VA_ARGS__};                                                         \
    return nccl_pass(&call)

#define DATA .send = send, .recv = recv, .count = count, .type = type
#define DATA_PARAMETERS const void *send, void *recv, size_t count, ncclDataType_t type

API(AllReduce, DATA_PARAMETERS, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream) {
    PASS(AllReduce, AllReduce, DATA, .op = op);
}

API(Broadcast, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream) {
    PASS(Broadcast, Broadcast, DATA, .peer = root);
}

API(Bcast, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    nccl_stream stream) {
    PASS(Bcast, Bcast, .recv = recv, .count = count, .type = type, .peer = root);
}

API(Reduce, DATA_PARAMETERS, ncclRedOp_t op, int root, ncclComm_t comm, nccl_stream stream) {
    PASS(Reduce, Reduce, DATA, .op = op, .peer = root);
}

API(AllGather, DATA_PARAMETERS, ncclComm_t comm, nccl_stream stream) {
    PASS(AllGather, AllGather, DATA);
}

API(ReduceScatter, DATA_PARAMETERS, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream) {
    PASS(ReduceScatter, ReduceScatter, DATA, .op = op);
}

API(AlltoAll, DATA_PARAMETERS, ncclComm_t comm, nccl_stream stream) {
    PASS(AlltoAll, AlltoAll, DATA);
}

API(Gather, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream) {
    PASS(Gather, Gather, DATA, .peer = root);
}

API(Scatter, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream) {
    PASS(Scatter, Scatter, DATA, .peer = root);
}

/* From 2.32, with options for one call. */

API(AllReduceConfig, DATA_PARAMETERS, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    PASS(AllReduceConfig, AllReduce, DATA, .op = op, .config = (void *)config);
}

API(BroadcastConfig, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    PASS(BroadcastConfig, Broadcast, DATA, .peer = root, .config = (void *)config);
}

API(ReduceConfig, DATA_PARAMETERS, ncclRedOp_t op, int root, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    PASS(ReduceConfig, Reduce, DATA, .op = op, .peer = root, .config = (void *)config);
}

API(AllGatherConfig, DATA_PARAMETERS, ncclComm_t comm, nccl_stream stream, const void *config) {
    PASS(AllGatherConfig, AllGather, DATA, .config = (void *)config);
}

API(ReduceScatterConfig, DATA_PARAMETERS, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    PASS(ReduceScatterConfig, ReduceScatter, DATA, .op = op, .config = (void *)config);
}

API(AlltoAllConfig, DATA_PARAMETERS, ncclComm_t comm, nccl_stream stream, const void *config) {
    PASS(AlltoAllConfig, AlltoAll, DATA, .config = (void *)config);
}

API(GatherConfig, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    PASS(GatherConfig, Gather, DATA, .peer = root, .config = (void *)config);
}

API(ScatterConfig, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    PASS(ScatterConfig, Scatter, DATA, .peer = root, .config = (void *)config);
}

/* Point-to-point: NCCL matches in posting order and knows no tags, so what goes from one rank to
   another is a collective of the two. */

API(Send, const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    nccl_stream stream) {
    PASS(Send, Send, .send = send, .count = count, .type = type, .peer = peer);
}

API(Recv, void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    nccl_stream stream) {
    PASS(Recv, Recv, .recv = recv, .count = count, .type = type, .peer = peer);
}

API(PutSignal, const void *local, size_t count, ncclDataType_t type, int peer, ncclWindow_t window,
    size_t offset, int signal, int context, unsigned flags, ncclComm_t comm, nccl_stream stream) {
    PASS(PutSignal, PutSignal, .send = local, .count = count, .type = type, .peer = peer,
         .window = window, .offset = offset, .signal = signal, .context = context, .flags = flags);
}

API(Signal, int peer, int signal, int context, unsigned flags, ncclComm_t comm,
    nccl_stream stream) {
    PASS(Signal, Signal, .peer = peer, .signal = signal, .context = context, .flags = flags);
}

API(WaitSignal, int count, ncclWaitSignalDesc_t *waits, ncclComm_t comm, nccl_stream stream) {
    PASS(WaitSignal, WaitSignal, .count = (size_t)count, .waits = waits);
}
