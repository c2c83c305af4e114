/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual communicators: what the application holds as ncclComm_t is a pointer to one of ours, which
 * stays while the real one beneath it is destroyed and made again.
 *
 * State. LIVE: the real one can be used. DOWN: it was torn down, to be rebuilt (or left so, where not
 * all members came back). ENDED: the application destroyed it. Operations that take a number from
 * the gate need no more than that: none passes while it is closed. What may be called at any moment
 * (the watchdog's query, registrations) is bracketed by vcomm_enter and vcomm_leave, and a teardown
 * waits for those.
 */
#ifndef LIVESHIFT_INTERPOSER_VCOMM_H
#define LIVESHIFT_INTERPOSER_VCOMM_H

#include "gate/clocks.h"
#include "nccl_real.h"

#define VCOMM_MAGIC 0x6c697665636f6d6du /* not what a real ncclComm begins with */

enum vcomm_state {
    VCOMM_STARTING, /* its creation hasn't come back */
    VCOMM_MAKING,   /* that of a non-blocking one came back, and goes on */
    VCOMM_LIVE,
    VCOMM_DOWN,
    VCOMM_BROKEN, /* its creation failed, the real one is there to be aborted */
    VCOMM_ENDED
};

/* A copy of the caller's ncclConfig_t: its `size` bytes, and its strings. NULL where he gave none. */
struct nccl_config *config_copy(const void *given);
struct nccl_config *config_or_default(const struct nccl_config *config);
bool config_blocks(const struct nccl_config *config);
const char *config_name(const struct nccl_config *config); /* NULL: none */
void config_free(struct nccl_config *config);

/* ncclCommRegister's handle. */
struct registration {
    struct registration *next;
    void *buffer;
    size_t size;
    void *real;
};

/* A window's handle is the first real one, because device code may be given it. */
struct window {
    struct window *next;
    ncclWindow_t handle, real;
    ncclWindow_t *out; /* where the caller wants the handle */
    void *buffer;
    size_t size;
    int flags;
};

/* An operator that ncclRedOpCreatePreMulSum made. */
struct reduction {
    struct reduction *next;
    ncclRedOp_t handle, real;
    ncclDataType_t type;
    ncclScalarResidence_t residence;
    unsigned char scalar[8];
    void *device_scalar;
};

/* How it was made. */
struct creation {
    enum nccl_function function;
    ncclUniqueId *ids;
    int id_count;
    int color, key; /* of a split */
    int *excluded;  /* of a shrink */
    int excluded_count, flags;
    int size, rank;            /* as the caller gave them */
    struct nccl_config *given; /* passed on */
    void *raw;                 /* instead, where it could not be copied */
    struct vcomm *parent;      /* NULL: none */
    ncclComm_t *out;           /* where the caller wants the handle; NULL once it is settled */
    bool untracked;            /* counted in the page */
};

typedef _Atomic(struct liveshift_clock *) pair_clock;

struct vcomm {
    uint64_t magic;
    ncclComm_t real;
    _Atomic uint32_t state;                       /* enum vcomm_state */
    _Atomic uint32_t uses;                        /* threads between vcomm_enter and vcomm_leave */
    _Atomic uintptr_t quick;                      /* see below */
    struct gate *gate;                            /* of `clock` */
    _Atomic(struct liveshift_communicator *) row; /* NULL: no room in the page */
    _Atomic(struct liveshift_clock *) clock;      /* of the collectives; NULL likewise, or ENDED */
    pair_clock *_Atomic pairs;                    /* sends to each rank, then receives from each */
    _Atomic(struct liveshift_stream *) stream;    /* the last it was used on */
    uint64_t id, parent;
    int size, rank, device;
    char made_by;
    bool blocking;
    _Atomic bool finalized;               /* by the application */
    _Atomic bool captured;                /* operations of it, into a graph */
    _Atomic bool real_claimed, real_gone; /* who ends the real one, and that it was ended */
    struct nccl_config *config;           /* its own, or that of the one it was split from */
    struct creation how;
    _Atomic uint32_t children, shrinks, grows; /* made from this one: the same on all members */
    pthread_mutex_t records;                   /* the three lists; not held across a call */
    struct registration *registrations, **registrations_end;
    struct window *windows, **windows_end;
    struct reduction *reductions, **reductions_end;
    ncclRedOp_t reduction_count;
    struct vcomm *next;
};

/*
 * `quick` is a stream on which nothing has to be done before the real call: the communicator is LIVE,
 * the stream is known to have carried communication since the last drain, and no stream is being
 * captured, as far as the hooks see captures begin (stream_seen in streams.h). QUICK_NONE: there is
 * none. Whatever ends one of these conditions clears it afterwards; who sets it looks again after.
 */
#define QUICK_NONE UINTPTR_MAX
void vcomm_quick(struct vcomm *v, nccl_stream stream);
void vcomms_not_quick(void);

/* A fork's child: none of the parent's is its own. */
void vcomms_forked(void);

/* All that are not ENDED, in the order they were made; under vcomms_lock. */
extern struct vcomm *vcomms;
extern pthread_mutex_t vcomms_lock;

/* Ours behind a handle, or NULL: a real one, or none. */
static inline struct vcomm *vcomm_of(ncclComm_t handle) {
    struct vcomm *v = (struct vcomm *)handle;
    return v != NULL && v->magic == VCOMM_MAGIC ? v : NULL;
}

static inline ncclComm_t vcomm_handle(struct vcomm *v) { return (ncclComm_t)v; }

/* NULL: out of memory. */
struct vcomm *vcomm_new(void);
/* In the list, with its rows in the page. `pending`: the agent is not shown it yet. */
void vcomm_list(struct vcomm *v, bool pending);
/* The application has ended it, or it never was. The struct stays, for who still holds the handle. */
void vcomm_end(struct vcomm *v);

/* The clock of messages between this rank and a peer; NULL: no such peer, or no room. */
struct liveshift_clock *vcomm_pair(struct vcomm *v, int peer, bool sends);

/* False: its real one can't be used now. */
bool vcomm_enter(struct vcomm *v);
/* Waits for a rebuild to come to its end; false: there is none to wait for. */
bool vcomm_enter_waiting(struct vcomm *v);
static inline void vcomm_leave(struct vcomm *v) { atomic_fetch_sub(&v->uses, 1); }

/* After the gate: the real one, and what a rebuild has written besides; NULL: there is none. */
static inline ncclComm_t vcomm_real(struct vcomm *v) {
    uint32_t state = atomic_load_explicit(&v->state, memory_order_acquire);
    return state == VCOMM_DOWN || state == VCOMM_ENDED ? NULL : v->real;
}

/* Why it can't be torn down, for the page; the first reason stays. */
void vcomm_unsafe(struct vcomm *v, const char *why);

/* Whether it was, and why. */
#define VCOMM_WHY sizeof(((struct liveshift_communicator *)0)->unsafe)
bool vcomm_is_unsafe(struct vcomm *v, char why[static VCOMM_WHY]);

/* Operations of it went into a graph; and such graphs are known to be gone. */
void vcomm_captured(struct vcomm *v);
void vcomm_not_captured(struct vcomm *v);

/* One more operation, for people: two threads may count one, which an atomic addition on each call
   would not be worth. */
static inline void vcomm_counts(struct vcomm *v) {
    _Atomic uint64_t *count = &v->row->operations;
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

/* What holds for the whole process (encryption, foreign communicators); NULL: nothing. */
extern _Atomic(const char *) vcomms_unsafe;

#endif
