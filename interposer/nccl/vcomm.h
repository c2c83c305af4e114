/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual communicators (vcomms). The application's ncclComm_t is a pointer to a vcomm. The vcomm
 * stays while the interposer destroys the real communicator beneath it and makes it again.
 *
 * State. LIVE: the real communicator can be used. DOWN: it was torn down and will be rebuilt (or it
 * stays down, if not all members came back). ENDED: the application ended it, or its creation
 * failed.
 *
 * Operations that take a number from the gate need no other protection, since none passes a closed
 * gate. Functions that may be called at any moment (the watchdog's query, registrations) stand
 * between vcomm_enter and vcomm_leave, and a teardown waits for them.
 */
#ifndef LIVESHIFT_INTERPOSER_VCOMM_H
#define LIVESHIFT_INTERPOSER_VCOMM_H

#include "gate/clocks.h"
#include "nccl_real.h"

#define VCOMM_MAGIC 0x6c697665636f6d6du /* a real ncclComm begins with another number */

enum vcomm_state {
    VCOMM_STARTING, /* the call that creates it hasn't come back */
    VCOMM_MAKING,   /* that call was non-blocking and came back; the creation goes on */
    VCOMM_LIVE,
    VCOMM_DOWN,
    VCOMM_BROKEN, /* its creation failed; the real one exists only to be aborted */
    VCOMM_ENDED
};

/* A copy of the caller's ncclConfig_t: its `size` bytes and its strings. NULL: the caller gave
   none, no ncclConfig_t has this `size`, or there is no memory. config_or_default copies a config
   that we have, or makes one of defaults from NULL. */
struct nccl_config *config_copy(const void *given);
struct nccl_config *config_or_default(const struct nccl_config *config);
bool config_blocks(const struct nccl_config *config);
const char *config_name(const struct nccl_config *config); /* NULL: none */
void config_free(struct nccl_config *config);

/* The handle that ncclCommRegister returns. */
struct registration {
    struct registration *next;
    void *buffer;
    size_t size;
    void *real;
};

/* A window. Its handle is the first real handle, because the application may pass it to device
   code. */
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

/* How a communicator was made. */
struct creation {
    enum nccl_function function;
    ncclUniqueId *ids;
    int id_count;
    int color, key; /* arguments of a split */
    int *excluded;  /* argument of a shrink */
    int excluded_count, flags;
    int size, rank;            /* as the caller gave them */
    struct nccl_config *given; /* the copy that we pass to NCCL */
    void *raw;                 /* the caller's own config, if we could not copy it */
    struct vcomm *parent;      /* NULL: none */
    ncclComm_t *out;           /* where the caller wants the handle; NULL once it is settled */
    bool untracked;            /* counted in the page's `untracked` */
};

typedef _Atomic(struct liveshift_clock *) pair_clock;

struct vcomm {
    uint64_t magic;
    ncclComm_t real;
    _Atomic uint32_t state;                       /* enum vcomm_state */
    _Atomic uint32_t uses;                        /* threads between vcomm_enter and vcomm_leave */
    _Atomic uintptr_t fast_stream;                /* see below */
    struct gate *gate;                            /* of `clock` */
    _Atomic(struct liveshift_communicator *) row; /* NULL: no room in the page */
    _Atomic(struct liveshift_clock *) clock;      /* of its collectives; NULL: no room, or ENDED */
    pair_clock *_Atomic pairs;                    /* sends to each rank, then receives from each */
    _Atomic(struct liveshift_stream *) stream;    /* the last stream it was used on */
    uint64_t id, parent;
    int size, rank, device;
    char made_by;
    bool blocking;
    _Atomic bool finalized;                /* the application has finalized it */
    _Atomic bool captured;                 /* operations of it were captured into a graph */
    _Atomic bool real_claimed, real_ended; /* a thread is ending the real one; it has ended */
    struct nccl_config *config;            /* a copy of its own, or of its parent's */
    struct creation creation;
    _Atomic uint32_t children, shrinks, grows; /* made from this one; same on all members */
    pthread_mutex_t records;                   /* of the three lists; never held across a call */
    struct registration *registrations;        /* each list in the order of making */
    struct window *windows;
    struct reduction *reductions;
    ncclRedOp_t reduction_count;
    struct vcomm *next;
};

/*
 * `fast_stream` is a stream on which a collective may take the fast path: nothing has to be done
 * before the real call. Three conditions hold: the communicator is LIVE, the page already says that
 * the stream has carried communication since the last drain, and no stream is being captured, as
 * far as the hooks see captures begin (stream_seen in streams.h). FAST_STREAM_NONE: no such stream.
 * Code that ends one of these conditions clears `fast_stream` afterwards; code that sets
 * `fast_stream` checks them again afterwards.
 */
#define FAST_STREAM_NONE UINTPTR_MAX
void vcomm_set_fast_stream(struct vcomm *v, nccl_stream stream);
void vcomms_clear_fast_stream(void);

/* For the child of a fork: forgets the parent's vcomms, since none belongs to the child. */
void vcomms_forked(void);

/* All vcomms that are not ENDED, in the order they were made; under vcomms_lock. */
extern struct vcomm *vcomms;
extern pthread_mutex_t vcomms_lock;

/* The vcomm behind a handle. NULL: the handle is a real communicator, or NULL. */
static inline struct vcomm *vcomm_of(ncclComm_t handle) {
    struct vcomm *v = (struct vcomm *)handle;
    return v != NULL && v->magic == VCOMM_MAGIC ? v : NULL;
}

static inline ncclComm_t vcomm_handle(struct vcomm *v) { return (ncclComm_t)v; }

/* A new vcomm. NULL: out of memory. */
struct vcomm *vcomm_new(void);
/* Adds the vcomm to the list, and makes its rows in the page if it has an id. A second call adds
   only what is missing. `pending`: the agent does not see the communicator yet. */
void vcomm_list(struct vcomm *v, bool pending);
/* The application has ended the communicator, or its creation failed. The struct stays, because
   threads may still use the handle. */
void vcomm_end(struct vcomm *v);

/* The clock of the messages from or to a peer (`sends`: to it). NULL: no such peer, or no room. */
struct liveshift_clock *vcomm_pair(struct vcomm *v, int peer, bool sends);

/* Keeps a teardown away until vcomm_leave. False: the real communicator can't be used now. */
bool vcomm_enter(struct vcomm *v);
/* The same, but waits for the end of a rebuild first. False: no rebuild will come. */
bool vcomm_enter_waiting(struct vcomm *v);
static inline void vcomm_leave(struct vcomm *v) { atomic_fetch_sub(&v->uses, 1); }

/* The real communicator, for a thread that has passed the gate. The thread then also sees all that
   a rebuild has written. NULL: there is none. */
static inline ncclComm_t vcomm_real(struct vcomm *v) {
    uint32_t state = atomic_load_explicit(&v->state, memory_order_acquire);
    return state == VCOMM_DOWN || state == VCOMM_ENDED ? NULL : v->real;
}

/* Writes into the page why the communicator can't be torn down; the first reason stays. */
void vcomm_unsafe(struct vcomm *v, const char *why);

/* Whether the communicator can't be torn down, and why. */
#define VCOMM_WHY sizeof(((struct liveshift_communicator *)0)->unsafe)
bool vcomm_is_unsafe(struct vcomm *v, char why[static VCOMM_WHY]);

/* vcomm_captured: operations of the communicator were captured into a graph. vcomm_not_captured:
   all such graphs are known to be destroyed. */
void vcomm_captured(struct vcomm *v);
void vcomm_not_captured(struct vcomm *v);

/* Counts one more operation, for display. Two threads at once may count only one; an atomic
   addition on each call would cost too much for this. */
static inline void vcomm_count_operation(struct vcomm *v) {
    _Atomic uint64_t *count = &v->row->operations;
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

/* Why no communicator of this process can be torn down (encryption, communicators that are not
   ours); NULL: no such reason. */
extern _Atomic(const char *) vcomms_unsafe;

#endif
