/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the real call that a struct nccl_call describes. */

#include "ledger/graphs.h"
#include "nccl_calls.h"

struct liveshift_clock *nccl_clock(const struct nccl_call *call) {
    struct vcomm *v = call->v;
    switch (call->function) {
    case NCCL_DO_Send:
        return vcomm_pair(v, call->peer, true);
    case NCCL_DO_Recv:
        return vcomm_pair(v, call->peer, false);
    case NCCL_DO_CommShrink: /* not all members of the parent call it */
        return call->made->clock;
    case NCCL_DO_PutSignal: /* waits may take signals in any order, and only some of them */
    case NCCL_DO_Signal:
    case NCCL_DO_WaitSignal:
    case NCCL_DO_CommAbort: /* an emergency must not wait */
        return NULL;
    default:
        return v != NULL ? v->clock : call->made != NULL ? call->made->clock : NULL;
    }
}

/* Communication is about to be enqueued: marks the stream, so that it is drained before the next
   teardown. */
static void mark_stream(struct vcomm *v, nccl_stream stream) {
    uint64_t handle = stream != NULL ? (uint64_t)(uintptr_t)stream : STREAM_LEGACY;
    struct liveshift_stream *row = atomic_load_explicit(&v->stream, memory_order_relaxed);
    if (row == NULL || atomic_load_explicit(&row->handle, memory_order_relaxed) != handle) {
        row = stream_row(handle, v->device);
        atomic_store_explicit(&v->stream, row, memory_order_relaxed);
    }
    if (row == NULL)
        vcomm_unsafe(v, "there is no room in the page for the streams it was used on");
    else {
        if ((atomic_load_explicit(&row->use, memory_order_relaxed) & STREAM_DIRTY) == 0)
            atomic_fetch_or(&row->use, STREAM_DIRTY);
        if (stream_seen(row))
            vcomm_set_fast_stream(v, stream);
    }
}

/* Records what must be known before a call is made. False: there is nothing to call, and *result is
   the answer. */
static bool prepare(const struct nccl_call *call, ncclResult_t *result) {
    struct vcomm *v = call->v;
    uint32_t state = atomic_load_explicit(&v->state, memory_order_acquire);
    if (state == VCOMM_DOWN || state == VCOMM_ENDED) {
        *result = ncclRemoteError; /* its peers are gone, or it was ended while this call waited */
        return false;
    }
    if (v->row != NULL)
        vcomm_count_operation(v);
    if (__builtin_expect(cuda_captures(call->stream), 0)) {
        ledger_capture_has_nccl((uintptr_t)call->stream);
        vcomm_captured(v);
    } else
        mark_stream(v, call->stream);
    return true;
}

#define DATA call->send, call->recv, call->count, call->type

/* A collective, and its variant with options for one call. */
#define BOTH(name, ...)                                                                            \
    case NCCL_DO_##name:                                                                           \
        return NCCL_CALL(name, __VA_ARGS__);                                                       \
    case NCCL_DO_##name##Config:                                                                   \
        return NCCL_CALL(name##Config, __VA_ARGS__, call->config)

static ncclResult_t one_sided(const struct nccl_call *call, ncclComm_t comm) {
    struct vcomm *v = call->v;
    if (v != NULL)
        vcomm_unsafe(v, "one-sided operations (ncclPutSignal, ncclSignal) were used on it");
    if (call->function == NCCL_DO_Signal)
        return NCCL_CALL(Signal, call->peer, call->signal, call->context, call->flags, comm,
                         call->stream);
    if (call->function == NCCL_DO_WaitSignal)
        return NCCL_CALL(WaitSignal, (int)call->count, call->waits, comm, call->stream);
    ncclWindow_t window = v != NULL ? window_real(v, call->window) : call->window;
    return NCCL_CALL(PutSignal, call->send, call->count, call->type, call->peer, window,
                     call->offset, call->signal, call->context, call->flags, comm, call->stream);
}

ncclResult_t nccl_launch(const struct nccl_call *call) {
    struct vcomm *v = call->v;
    if (call->made != NULL)
        return creation_launch(call->made);
    switch (call->function) {
    case NCCL_DO_CommWindowRegister:
    case NCCL_DO_CommWindowDeregister:
        return window_launch(call);
    case NCCL_DO_CommFinalize:
    case NCCL_DO_CommDestroy:
    case NCCL_DO_CommAbort:
    case NCCL_DO_CommSuspend:
    case NCCL_DO_CommResume:
        return ending_launch(call);
    default:
        break;
    }
    ncclResult_t refused;
    if (v != NULL && !prepare(call, &refused))
        return refused;
    ncclComm_t comm = v != NULL ? v->real : call->comm;
    nccl_stream stream = call->stream;
    ncclRedOp_t op = call->op >= NCCL_NUM_OPS && v != NULL ? reduction_real(v, call->op) : call->op;
    switch (call->function) {
        BOTH(AllReduce, DATA, op, comm, stream);
        BOTH(Broadcast, DATA, call->peer, comm, stream);
        BOTH(Reduce, DATA, op, call->peer, comm, stream);
        BOTH(AllGather, DATA, comm, stream);
        BOTH(ReduceScatter, DATA, op, comm, stream);
        BOTH(AlltoAll, DATA, comm, stream);
        BOTH(Gather, DATA, call->peer, comm, stream);
        BOTH(Scatter, DATA, call->peer, comm, stream);
    case NCCL_DO_Bcast:
        return NCCL_CALL(Bcast, call->recv, call->count, call->type, call->peer, comm, stream);
    case NCCL_DO_Send:
        return NCCL_CALL(Send, call->send, call->count, call->type, call->peer, comm, stream);
    case NCCL_DO_Recv:
        return NCCL_CALL(Recv, call->recv, call->count, call->type, call->peer, comm, stream);
    default:
        return one_sided(call, comm);
    }
}
