/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One NCCL call that needs its peers, as data. The interposer makes the call at once. In a group
 * that was begun with the gate closed, it collects the call and makes it at the group's end.
 */
#ifndef LIVESHIFT_INTERPOSER_NCCL_CALLS_H
#define LIVESHIFT_INTERPOSER_NCCL_CALLS_H

#include "cuda/device_calls.h"
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
    int peer; /* or the root of a collective that has one */
    /* For one-sided operations. `window` is also the one to deregister. */
    ncclWindow_t window;
    size_t offset;
    int signal, context;
    unsigned flags; /* a suspension uses them, too */
    struct window *window_made;
    ncclWaitSignalDesc_t *waits; /* `count` of them; a copy where `collected` */
    void *config;                /* of the ...Config variants; a copy where `collected` */
    struct vcomm *made;          /* the new one, if the call creates a communicator */
    bool collected;
    struct vcomm *v;               /* nccl_pass sets it */
    struct liveshift_clock *clock; /* nccl_pass sets it */
};

/* Takes the call through the gate, or adds it to the open group. */
ncclResult_t nccl_pass(struct nccl_call *call);

/* Makes a collective's call that has announced its number. It may have to wait at the gate. */
ncclResult_t nccl_call_announced(struct nccl_call *call);

/* Announces a single collective. True: it may take the fast path, on which only the real call is
   left to do. `fast_stream` must be read after the order, because it may change while the gate is
   closed. */
static inline bool nccl_fast_path(struct vcomm *v, struct liveshift_clock *clock, enum kind kind,
                                  int32_t tid, nccl_stream stream) {
    struct gate *gate = v->gate;
    struct liveshift_page *page = gate->page;
    gate_announce(gate, clock, kind, tid);
    return atomic_load(&page->order.want) == LIVESHIFT_OPEN &&
           atomic_load_explicit(&v->fast_stream, memory_order_acquire) == (uintptr_t)stream;
}

/* The real call, on the real communicator as it is now. nccl_launch.c */
ncclResult_t nccl_launch(const struct nccl_call *call);

/* The clock from which a call takes its number; NULL: none. nccl_launch.c */
struct liveshift_clock *nccl_clock(const struct nccl_call *call);

/* Does what must follow a call. Called after the call or its group has come back. */
void nccl_complete(struct nccl_call *call, ncclResult_t result);

/* Creations of communicators: the real call, and what follows it. nccl_create.c */
ncclResult_t creation_launch(struct vcomm *made);
void creation_complete(struct vcomm *made, ncclResult_t result);
/* Looks whether a non-blocking creation has ended. */
void creation_poll(struct vcomm *made);

/* Endings of communicators: the real call, and what follows it. nccl_end.c */
ncclResult_t ending_launch(const struct nccl_call *call);
void ending_complete(const struct nccl_call *call, ncclResult_t result);

/* Objects of a communicator: the real handle behind the application's handle.
   nccl_records.c */
ncclRedOp_t reduction_real(struct vcomm *v, ncclRedOp_t handle);
ncclWindow_t window_real(struct vcomm *v, ncclWindow_t handle);
/* Returns the real window behind a handle whose address the application passes to other code. Its
   communicator can no longer be torn down. */
ncclWindow_t window_exported(ncclWindow_t handle);
/* Makes registrations, windows and operators again on a rebuilt communicator. Returns ncclSuccess,
   or the first error, with the step that failed in *what (words in static storage). */
ncclResult_t records_replay(struct vcomm *v, const char **what);

ncclResult_t window_launch(const struct nccl_call *call);
void window_complete(const struct nccl_call *call, ncclResult_t result);

#endif
