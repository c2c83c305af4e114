/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The application ends communicators, or suspends them. All but two of these functions pass the
 * gate. An abort is an emergency and passes at any time. ncclCommRevoke waits only for the end of a
 * rebuild.
 */

#include "hooks/exported.h"
#include "nccl_calls.h"
#include "service/service.h"

static ncclResult_t pass(enum nccl_function function, enum kind kind, ncclComm_t comm,
                         unsigned flags) {
    struct nccl_call call = {.function = function, .kind = kind, .comm = comm, .flags = flags};
    return nccl_pass(&call);
}

#define PASSES(name)                                                                               \
    EXPORTED ncclResult_t nccl##name(ncclComm_t comm) {                                            \
        return pass(NCCL_DO_##name, NCCL_##name, comm, 0);                                         \
    }
PASSES(CommFinalize)
PASSES(CommDestroy)
PASSES(CommAbort)
PASSES(CommResume)

EXPORTED ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
    return pass(NCCL_DO_CommSuspend, NCCL_CommSuspend, comm, (unsigned)flags);
}

EXPORTED ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    struct vcomm *v = vcomm_of(comm);
    if (v == NULL)
        return NCCL_CALL(CommRevoke, comm, flags);
    if (!vcomm_enter_waiting(v))
        return ncclInvalidArgument;
    vcomm_unsafe(v, "it was revoked");
    ncclResult_t result = NCCL_CALL(CommRevoke, v->real, flags);
    vcomm_leave(v);
    return result;
}

static ncclResult_t abort_now(struct vcomm *v) {
    struct gate *gate = current_gate();
    /* A teardown changes LIVE to DOWN in the same way. So only one of the two ends the real one. */
    if (!vcomm_enter(v))
        return ncclSuccess; /* DOWN: there is no real communicator */
    uint32_t state = atomic_load(&v->state);
    while (state != VCOMM_DOWN && state != VCOMM_ENDED &&
           !atomic_compare_exchange_weak(&v->state, &state, VCOMM_ENDED))
        ;
    atomic_store(&v->fast_stream, FAST_STREAM_NONE);
    ncclResult_t result = ncclSuccess;
    /* Gives other threads 100 ms to leave. The service thread may be asking NCCL something. An
       application's thread may be stuck inside for ever: the abort must free it. */
    for (int ms = 0; ms < 100 && atomic_load(&v->uses) > 1; ms++)
        task_pause();
    if (state != VCOMM_DOWN && state != VCOMM_ENDED) {
        gate_untracked_begin(gate);
        result = NCCL_CALL(CommAbort, v->real);
        gate_untracked_end(gate);
    }
    vcomm_leave(v);
    return result;
}

ncclResult_t ending_launch(const struct nccl_call *call) {
    struct vcomm *v = call->v;
    ncclComm_t comm = v != NULL ? vcomm_real(v) : call->comm;
    bool has_ended = v != NULL && comm == NULL;
    switch (call->function) {
    case NCCL_DO_CommFinalize:
        return has_ended ? ncclSuccess : NCCL_CALL(CommFinalize, comm);
    case NCCL_DO_CommDestroy:
        return has_ended ? ncclSuccess : NCCL_CALL(CommDestroy, comm);
    case NCCL_DO_CommAbort:
        return v != NULL ? abort_now(v) : NCCL_CALL(CommAbort, comm);
    case NCCL_DO_CommSuspend:
        if (v != NULL)
            vcomm_unsafe(v, "it was suspended (ncclCommSuspend)");
        return NCCL_CALL(CommSuspend, comm, (int)call->flags);
    default:
        return NCCL_CALL(CommResume, comm);
    }
}

void ending_complete(const struct nccl_call *call, ncclResult_t result) {
    struct vcomm *v = call->v;
    bool ended = call->function == NCCL_DO_CommDestroy || call->function == NCCL_DO_CommAbort;
    if (v != NULL && ended && (result == ncclSuccess || result == ncclInProgress))
        vcomm_end(v);
    else if (v != NULL && call->function == NCCL_DO_CommFinalize) {
        v->finalized = true; /* it can only be destroyed now: there is nothing to rebuild */
        if (v->row != NULL)
            atomic_store(&v->row->state, LIVESHIFT_COMM_ENDED);
    }
}
