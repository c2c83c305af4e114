/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One NCCL call that needs its peers, as data: so that it can be made at once, or collected while a
 * group is open and the gate closed, and made at the group's end.
 */
#ifndef LIVESHIFT_INTERPOSER_NCCL_CALLS_H
#define LIVESHIFT_INTERPOSER_NCCL_CALLS_H

#include "cuda/cuda_calls.h"
#include "ledger/streams.h"
#include "vcomm.h"

struct nccl_call {
    enum nccl_function function;
    enum kind kind;
    ncclComm_t comm; /* as the caller gave it */
    nccl_stream stream;
    const void *send;
    void *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer; /* or the root */
    /* one-sided */
    ncclWindow_t window;
    size_t offset;
    int signal, context;
    unsigned flags; /* of a suspension, too */
    struct window *window_made;
    ncclWaitSignalDesc_t *waits; /* `count` of them; a copy where `collected` */
    void *config;                /* of ...Config; likewise */
    struct vcomm *made;          /* of a creation */
    bool collected;
    struct vcomm *v;               /* set by nccl_pass */
    struct liveshift_clock *clock; /* likewise */
};

/* Through the gate, or into the open group. */
ncclResult_t nccl_pass(struct nccl_call *call);

/* The rest of the way of a collective that has taken its number, and may have to wait for it. */
ncclResult_t nccl_admitted(struct nccl_call *call);

/* Whether a collective by itself may go the short way: it takes its number, and then the real call is
   all there is to do. To be asked after the gate, beneath which all of this may have changed. */
static inline bool nccl_short_way(struct vcomm *v, struct liveshift_clock *clock, enum kind kind,
                                  int32_t tid, nccl_stream stream) {
    struct gate *gate = v->gate;
    struct liveshift_page *page = gate->page;
    gate_announce(gate, clock, kind, tid);
    return atomic_load(&page->order.want) == LIVESHIFT_OPEN &&
           atomic_load_explicit(&v->quick, memory_order_acquire) == (uintptr_t)stream;
}

/* The real call, on the real communicator as it is now. nccl_launch.c */
ncclResult_t nccl_launch(const struct nccl_call *call);

/* The clock that a call takes a number of; NULL: none. nccl_launch.c */
struct liveshift_clock *nccl_clock(const struct nccl_call *call);

/* What follows a call when it, or the group it was made in, has come back. */
void nccl_settle(struct nccl_call *call, ncclResult_t result);

/* Creations: the real call, and what follows. nccl_create.c */
ncclResult_t creation_launch(struct vcomm *made);
void creation_settle(struct vcomm *made, ncclResult_t result);
/* Of a non-blocking one: whether it has come to its end. */
void creation_poll(struct vcomm *made);

/* Shutting down: the real call, and what follows. nccl_end.c */
ncclResult_t ending_launch(const struct nccl_call *call);
void ending_settle(const struct nccl_call *call, ncclResult_t result);

/* What hangs on a communicator: what a handle means now; nccl_records.c */
ncclRedOp_t reduction_now(struct vcomm *v, ncclRedOp_t handle);
ncclWindow_t window_now(struct vcomm *v, ncclWindow_t handle);
/* A window of some communicator, which is no longer one that can be torn down. */
ncclWindow_t window_given_away(ncclWindow_t handle);
/* Makes registrations, windows and operators again on a rebuilt communicator. */
ncclResult_t records_replay(struct vcomm *v, const char **what);

ncclResult_t window_launch(const struct nccl_call *call);
void window_settle(const struct nccl_call *call, ncclResult_t result);

#endif
