/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's exported operations: collectives, point-to-point, one-sided. */

#include "hooks/exported.h"
#include "nccl_calls.h"

#define CALL_FIELDS(name, counted, ...)                                                            \
    {.function = NCCL_DO_##name,                                                                   \
     .kind = NCCL_##counted,                                                                       \
     .comm = comm,                                                                                 \
     .stream = stream,                                                                             \
     __VA_ARGS__}

#define PASS(name, counted, ...)                                                                   \
    struct nccl_call call = CALL_FIELDS(name, counted, __VA_ARGS__);                               \
    return nccl_pass(&call)

/* A collective. The exported function is the fast path, which training takes all the time: it calls
   nothing but the real function. It is taken only if `simple` holds. All else is in functions of
   their own with the same parameters, so that the compiler need not keep registers for it. `before`
   and `after` are the arguments before and after communicator and stream. */
#define COLLECTIVE(name, counted, simple, parameters, before, after, ...)                          \
    static ASIDE ncclResult_t pass_##name parameters {                                             \
        struct nccl_call call = CALL_FIELDS(name, counted, __VA_ARGS__);                           \
        return nccl_pass(&call);                                                                   \
    }                                                                                              \
    static ASIDE ncclResult_t announced_##name parameters {                                        \
        struct nccl_call call = CALL_FIELDS(name, counted, __VA_ARGS__);                           \
        call.v = vcomm_of(comm);                                                                   \
        call.clock = call.v->clock;                                                                \
        return nccl_call_announced(&call);                                                         \
    }                                                                                              \
    EXPORTED ncclResult_t nccl##name parameters {                                                  \
        struct vcomm *v = vcomm_of(comm);                                                          \
        struct nccl_thread *thread = &nccl_thread;                                                 \
        nccl_real_##name *real = (nccl_real_##name *)nccl_known(NCCL_DO_##name);                   \
        struct liveshift_clock *clock;                                                             \
        int32_t tid = thread->tid;                                                                 \
        if (UNLIKELY(v == NULL || real == NULL || tid == 0 || !(simple) ||                         \
                     (clock = atomic_load_explicit(&v->clock, memory_order_relaxed)) == NULL))     \
            return pass_##name(UNPACKED before, comm, stream UNPACKED after);                      \
        if (UNLIKELY(!nccl_fast_path(v, clock, NCCL_##counted, tid, stream)))                      \
            return announced_##name(UNPACKED before, comm, stream UNPACKED after);                 \
        vcomm_count_operation(v);                                                                  \
        thread->inside++;                                                                          \
        ncclResult_t result = real(UNPACKED before, v->real, stream UNPACKED after);               \
        thread->inside--;                                                                          \
        gate_end(clock);                                                                           \
        return result;                                                                             \
    }
#define ASIDE __attribute__((noinline, cold))
#define UNLIKELY(condition) __builtin_expect(condition, 0)
#define UNPACKED(...) __VA_ARGS__
#define SIMPLE_OP ((unsigned)op < NCCL_NUM_OPS)

#define DATA .send = send, .recv = recv, .count = count, .type = type
#define DATA_PARAMETERS const void *send, void *recv, size_t count, ncclDataType_t type

/* A collective, and its variant from 2.32 with options for one call. `own` are the parameters that
   only this collective has, `before` all arguments before the communicator. */
#define COLLECTIVES(name, simple, own, before, ...)                                                \
    COLLECTIVE(name, name, simple,                                                                 \
               (DATA_PARAMETERS UNPACKED own, ncclComm_t comm, nccl_stream stream), before, (),    \
               DATA, __VA_ARGS__)                                                                  \
    COLLECTIVE(                                                                                    \
        name##Config, name, simple,                                                                \
        (DATA_PARAMETERS UNPACKED own, ncclComm_t comm, nccl_stream stream, const void *config),   \
        before, (, config), DATA, .config = (void *)config, __VA_ARGS__)

COLLECTIVES(AllReduce, SIMPLE_OP, (, ncclRedOp_t op), (send, recv, count, type, op), .op = op)
COLLECTIVES(Broadcast, true, (, int root), (send, recv, count, type, root), .peer = root)
COLLECTIVES(Reduce, SIMPLE_OP, (, ncclRedOp_t op, int root), (send, recv, count, type, op, root),
            .op = op, .peer = root)
COLLECTIVES(AllGather, true, (), (send, recv, count, type))
COLLECTIVES(ReduceScatter, SIMPLE_OP, (, ncclRedOp_t op), (send, recv, count, type, op), .op = op)
COLLECTIVES(AlltoAll, true, (), (send, recv, count, type))
COLLECTIVES(Gather, true, (, int root), (send, recv, count, type, root), .peer = root)
COLLECTIVES(Scatter, true, (, int root), (send, recv, count, type, root), .peer = root)

COLLECTIVE(Bcast, Bcast, true,
           (void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
            nccl_stream stream),
           (recv, count, type, root), (), .recv = recv, .count = count, .type = type, .peer = root)

/* Point-to-point. NCCL matches sends and receives in the order in which they are posted, without
   tags. So what one rank sends to another counts on a clock of its own, like a collective of these
   two ranks. */

EXPORTED ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                               ncclComm_t comm, nccl_stream stream) {
    PASS(Send, Send, .send = send, .count = count, .type = type, .peer = peer);
}

EXPORTED ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer,
                               ncclComm_t comm, nccl_stream stream) {
    PASS(Recv, Recv, .recv = recv, .count = count, .type = type, .peer = peer);
}

EXPORTED ncclResult_t ncclPutSignal(const void *local, size_t count, ncclDataType_t type, int peer,
                                    ncclWindow_t window, size_t offset, int signal, int context,
                                    unsigned flags, ncclComm_t comm, nccl_stream stream) {
    PASS(PutSignal, PutSignal, .send = local, .count = count, .type = type, .peer = peer,
         .window = window, .offset = offset, .signal = signal, .context = context, .flags = flags);
}

EXPORTED ncclResult_t ncclSignal(int peer, int signal, int context, unsigned flags, ncclComm_t comm,
                                 nccl_stream stream) {
    PASS(Signal, Signal, .peer = peer, .signal = signal, .context = context, .flags = flags);
}

EXPORTED ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t *waits, ncclComm_t comm,
                                     nccl_stream stream) {
    PASS(WaitSignal, WaitSignal, .count = (size_t)count, .waits = waits);
}
