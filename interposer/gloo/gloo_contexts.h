/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gloo's contexts, which are its communicators, by the addresses of their objects: what is known of
 * each, its row and its clocks. Looked up without a lock on every collective; written under one when
 * a context has connected and when it ends.
 */
#ifndef LIVESHIFT_INTERPOSER_GLOO_CONTEXTS_H
#define LIVESHIFT_INTERPOSER_GLOO_CONTEXTS_H

#include "gate/clocks.h"

/* How deep this thread is in a collective: what gloo calls from within is part of that one. */
extern __thread unsigned gloo_depth __attribute__((tls_model("initial-exec")));

struct gloo_context {
    struct gate *gate;
    struct liveshift_communicator *row;
    struct liveshift_clock *clock; /* of its collectives; NULL: its identity isn't agreed on */
    int32_t rank, size;
    const void *keys[2];                       /* the objects it is known by; NULL: none */
    _Atomic(struct liveshift_clock *) pairs[]; /* by gloo_pair_clock */
};

/* Twice as many as there can be rows, since a context has two keys, and as many again. */
#define GLOO_SLOT_BITS 11
#define GLOO_SLOTS (1u << GLOO_SLOT_BITS)
_Static_assert(GLOO_SLOTS >= 4 * LIVESHIFT_PAGE_COMMUNICATORS, "searches are short");

struct gloo_slot {
    _Atomic(const void *) key; /* NULL: never used, so no search goes beyond */
    struct gloo_context *context;
};

extern struct gloo_slot gloo_slots[GLOO_SLOTS];

/* Where the search for a key begins, and nearly always ends. */
static inline const struct gloo_slot *gloo_slot_at(const void *key) {
    return &gloo_slots[((uintptr_t)key >> 4) * 0x9e3779b97f4a7c15u >> (64 - GLOO_SLOT_BITS)];
}

/* The context known by this object; NULL: none. */
struct gloo_context *gloo_context_of(const void *key);

/* A context has connected as `made` says, id 0 where its members could not agree on one, and is
   known by these objects from now on; NULL where the page has no room or memory ran out. */
struct gloo_context *gloo_context_add(struct gate *gate, const struct communicator_made *made,
                                      const void *const keys[2]);

/* The object ends; nothing where it is no context's. */
void gloo_context_end(struct gate *gate, const void *key);

/* The clock of what goes from one member to another, one of which is this process; NULL where the
   page has no room or the context no identity. */
struct liveshift_clock *gloo_pair_clock(struct gate *gate, struct gloo_context *context,
                                        int32_t from, int32_t to);

#endif
