/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's exported operations: collectives, point-to-point, one-sided. */

#include "exported.h"
#include "nccl_calls.h"

/* Defines ncclX and declares it before, as -Wmissing-prototypes wants of what no header declares. */
#define API(name, ...)                                                                             \
    EXPORTED ncclResult_t nccl##name(__VA_ARGS__);                                                 \
    ncclResult_t nccl##name(__VA_ARGS__)

#define LONG_WAY(name, counted, ...)                                                               \
    {.function = NCCL_DO_##name,                                                                   \
     .kind = NCCL_##counted,                                                                       \
     .comm = comm,                                                                                 \
     .stream = stream,                                                                             \
     __VA_ARGS__}

#define PASS(name, counted, ...)                                                                   \
    struct nccl_call call = LONG_WAY(name, counted, __VA_ARGS__);                                  \
    return nccl_pass(&call)

/* A collective: `arguments` are the real function's, with `real` for the communicator. The short way
   is for what training does all the time; all else is in the long one. */
#define COLLECTIVE(name, counted, simple, arguments, ...)                                          \
    struct vcomm *v = vcomm_of(comm);                                                              \
    bool admitted = nccl_begin(v, NCCL_##counted);                                                 \
    if (__builtin_expect(admitted && (simple) && nccl_prepared(v, stream), 1)) {                   \
        ncclComm_t real = v->real;                                                                 \
        ncclResult_t result = NCCL_CALL(name, UNPACKED arguments);                                 \
        gate_end(v->clock);                                                                        \
        return result;                                                                             \
    }                                                                                              \
    struct nccl_call call = LONG_WAY(name, counted, __VA_ARGS__);                                  \
    return admitted ? nccl_admitted(&call) : nccl_pass(&call)
#define UNPACKED(...) __VA_ARGS__
#define SIMPLE_OP op < NCCL_NUM_OPS

#define DATA .send = send, .recv = recv, .count = count, .type = type
#define DATA_PARAMETERS const void *send, void *recv, size_t count, ncclDataType_t type

API(AllReduce, DATA_PARAMETERS, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream) {
    COLLECTIVE(AllReduce, AllReduce, SIMPLE_OP, (send, recv, count, type, op, real, stream), DATA,
               .op = op);
}

API(Broadcast, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream) {
    COLLECTIVE(Broadcast, Broadcast, true, (send, recv, count, type, root, real, stream), DATA,
               .peer = root);
}

API(Bcast, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    nccl_stream stream) {
    COLLECTIVE(Bcast, Bcast, true, (recv, count, type, root, real, stream), .recv = recv,
               .count = count, .type = type, .peer = root);
}

API(Reduce, DATA_PARAMETERS, ncclRedOp_t op, int root, ncclComm_t comm, nccl_stream stream) {
    COLLECTIVE(Reduce, Reduce, SIMPLE_OP, (send, recv, count, type, op, root, real, stream), DATA,
               .op = op, .peer = root);
}

API(AllGather, DATA_PARAMETERS, ncclComm_t comm, nccl_stream stream) {
    COLLECTIVE(AllGather, AllGather, true, (send, recv, count, type, real, stream), DATA);
}

API(ReduceScatter, DATA_PARAMETERS, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream) {
    COLLECTIVE(ReduceScatter, ReduceScatter, SIMPLE_OP, (send, recv, count, type, op, real, stream),
               DATA, .op = op);
}

API(AlltoAll, DATA_PARAMETERS, ncclComm_t comm, nccl_stream stream) {
    COLLECTIVE(AlltoAll, AlltoAll, true, (send, recv, count, type, real, stream), DATA);
}

API(Gather, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream) {
    COLLECTIVE(Gather, Gather, true, (send, recv, count, type, root, real, stream), DATA,
               .peer = root);
}

API(Scatter, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream) {
    COLLECTIVE(Scatter, Scatter, true, (send, recv, count, type, root, real, stream), DATA,
               .peer = root);
}

/* From 2.32, with options for one call. */

API(AllReduceConfig, DATA_PARAMETERS, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    COLLECTIVE(AllReduceConfig, AllReduce, SIMPLE_OP,
               (send, recv, count, type, op, real, stream, config), DATA, .op = op,
               .config = (void *)config);
}

API(BroadcastConfig, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    COLLECTIVE(BroadcastConfig, Broadcast, true,
               (send, recv, count, type, root, real, stream, config), DATA, .peer = root,
               .config = (void *)config);
}

API(ReduceConfig, DATA_PARAMETERS, ncclRedOp_t op, int root, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    COLLECTIVE(ReduceConfig, Reduce, SIMPLE_OP,
               (send, recv, count, type, op, root, real, stream, config), DATA, .op = op,
               .peer = root, .config = (void *)config);
}

API(AllGatherConfig, DATA_PARAMETERS, ncclComm_t comm, nccl_stream stream, const void *config) {
    COLLECTIVE(AllGatherConfig, AllGather, true, (send, recv, count, type, real, stream, config),
               DATA, .config = (void *)config);
}

API(ReduceScatterConfig, DATA_PARAMETERS, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    COLLECTIVE(ReduceScatterConfig, ReduceScatter, SIMPLE_OP,
               (send, recv, count, type, op, real, stream, config), DATA, .op = op,
               .config = (void *)config);
}

API(AlltoAllConfig, DATA_PARAMETERS, ncclComm_t comm, nccl_stream stream, const void *config) {
    COLLECTIVE(AlltoAllConfig, AlltoAll, true, (send, recv, count, type, real, stream, config),
               DATA, .config = (void *)config);
}

API(GatherConfig, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    COLLECTIVE(GatherConfig, Gather, true, (send, recv, count, type, root, real, stream, config),
               DATA, .peer = root, .config = (void *)config);
}

API(ScatterConfig, DATA_PARAMETERS, int root, ncclComm_t comm, nccl_stream stream,
    const void *config) {
    COLLECTIVE(ScatterConfig, Scatter, true, (send, recv, count, type, root, real, stream, config),
               DATA, .peer = root, .config = (void *)config);
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
