/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gloo's contexts, which are its communicators. A table gives for the address of a context's object
 * its row and its clocks in the page. Every collective looks up without a lock. A thread writes
 * under a lock, when a context has connected and when it ends.
 */
#ifndef LIVESHIFT_INTERPOSER_GLOO_CONTEXTS_H
#define LIVESHIFT_INTERPOSER_GLOO_CONTEXTS_H

#include "gate/clocks.h"

/* How many collectives this thread is inside: what gloo calls within one is part of that one. */
extern __thread unsigned gloo_depth __attribute__((tls_model("initial-exec")));

struct gloo_context {
    struct gate *gate;
    struct liveshift_communicator *row;
    struct liveshift_clock *clock; /* of its collectives; NULL: its members agreed on no identity */
    int32_t rank, size;
    const void *keys[2];                       /* the objects that find it; NULL: unused */
    _Atomic(struct liveshift_clock *) pairs[]; /* gloo_pair_clock fills and reads these */
};

/* The table has four slots for each possible row: a context has two keys, and half of the slots
   stay free. */
#define GLOO_SLOT_BITS 11
#define GLOO_SLOTS (1u << GLOO_SLOT_BITS)
_Static_assert(GLOO_SLOTS >= 4 * LIVESHIFT_PAGE_COMMUNICATORS, "searches are short");

struct gloo_slot {
    _Atomic(const void *) key; /* NULL: the slot was never used, and a search ends here */
    struct gloo_context *context;
};

extern struct gloo_slot gloo_slots[GLOO_SLOTS];

/* The slot where the search for a key begins, and nearly always ends. */
static inline const struct gloo_slot *gloo_slot_at(const void *key) {
    return &gloo_slots[((uintptr_t)key >> 4) * 0x9e3779b97f4a7c15u >> (64 - GLOO_SLOT_BITS)];
}

/* The context that belongs to this object; NULL: none. */
struct gloo_context *gloo_context_of(const void *key);

/* Adds a context that has connected, as `made` describes it (id 0: its members agreed on none).
   From now on these objects find it. NULL: the page has no room, or memory ran out. */
struct gloo_context *gloo_context_add(struct gate *gate, const struct communicator_info *made,
                                      const void *const keys[2]);

/* The object ends, and its context with it. Does nothing if the object belongs to no context. */
void gloo_context_end(struct gate *gate, const void *key);

/* The clock of the messages from one member to another; this process is one of the two. NULL: the
   page has no room, or the context has no identity. */
struct liveshift_clock *gloo_pair_clock(struct gate *gate, struct gloo_context *context,
                                        int32_t from, int32_t to);

#endif
