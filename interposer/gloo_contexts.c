/* SPDX-License-Identifier: Apache-2.0 */
#include "gloo_contexts.h"
#include "gloo_flights.h"

#include <stdlib.h>
#include <string.h>

__thread unsigned gloo_depth __attribute__((tls_model("initial-exec")));

struct gloo_slot gloo_slots[GLOO_SLOTS];

/* A slot's key after its context has ended: searches go on, and it can be used again. */
static const char was_used;

/* Taken to write to the slots, and before clocks.c's; held across fork(), so that no child inherits
   it from a thread that it doesn't have. */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) { pthread_mutex_lock(&writing); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&writing); }

/* The parent's contexts are no use here: both would read from the same connections. What the child
   does with them all the same passes unidentified. */
static void after_fork_in_child(void) {
    memset(gloo_slots, 0, sizeof gloo_slots);
    gloo_depth = 0;
    pthread_mutex_unlock(&writing);
}

static void handle_fork(void) {
    static bool handled; /* under `writing`; handlers are inherited, so once per exec */
    if (!handled)
        handled = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
}

/* Where the slot that a key comes to is another's. */
struct gloo_context *gloo_context_beyond(const void *key, size_t at) {
    for (size_t n = 0; n < GLOO_SLOTS; n++, at = (at + 1) % GLOO_SLOTS) {
        const void *seen = atomic_load_explicit(&gloo_slots[at].key, memory_order_acquire);
        if (seen == key || seen == NULL)
            return seen != NULL ? gloo_slots[at].context : NULL;
    }
    return NULL;
}

static struct gloo_slot *slot_for(const void *key) {
    struct gloo_slot *free = NULL;
    size_t at = gloo_slot_of(key);
    for (size_t n = 0; n < GLOO_SLOTS; n++, at = (at + 1) % GLOO_SLOTS) {
        const void *seen = atomic_load(&gloo_slots[at].key);
        if (seen == key)
            return &gloo_slots[at];
        if (free == NULL && (seen == NULL || seen == &was_used))
            free = &gloo_slots[at];
        if (seen == NULL)
            break;
    }
    return free;
}

/* Under `writing`. */
static void forget(struct gate *gate, struct gloo_context *context) {
    for (unsigned i = 0; i < 2; i++) {
        struct gloo_slot *slot = context->keys[i] != NULL ? slot_for(context->keys[i]) : NULL;
        if (slot != NULL && slot->context == context)
            atomic_store(&slot->key, (const void *)&was_used);
    }
    gloo_flights_drop(context);
    communicator_end(gate, context->row);
    free(context);
}

struct gloo_context *gloo_context_add(struct gate *gate, const struct communicator_made *made,
                                      const void *const keys[2]) {
    size_t pairs = 2 * (size_t)made->size;
    struct gloo_context *context = calloc(1, sizeof *context + pairs * sizeof context->pairs[0]);
    if (context == NULL)
        return NULL;
    context->rank = made->rank;
    context->size = made->size;
    pthread_mutex_lock(&writing);
    handle_fork();
    context->row = communicator_add(gate, made);
    if (context->row != NULL && (context->clock = clock_add(gate, context->row, -1, -1)) == NULL)
        communicator_end(gate, context->row);
    for (unsigned i = 0; i < 2 && context->clock != NULL; i++) {
        struct gloo_slot *slot = keys[i] != NULL ? slot_for(keys[i]) : NULL;
        if (slot == NULL)
            continue;
        if (atomic_load(&slot->key) == keys[i]) /* its predecessor's end was not seen */
            forget(gate, slot->context);
        context->keys[i] = keys[i];
        slot->context = context;
        atomic_store_explicit(&slot->key, keys[i], memory_order_release);
    }
    pthread_mutex_unlock(&writing);
    if (context->clock != NULL)
        return context;
    free(context);
    return NULL;
}

void gloo_context_end(struct gate *gate, const void *key) {
    pthread_mutex_lock(&writing);
    struct gloo_context *context = gloo_context_of(key);
    if (context != NULL)
        forget(gate, context);
    pthread_mutex_unlock(&writing);
}

struct liveshift_clock *gloo_pair_clock(struct gate *gate, struct gloo_context *context,
                                        int32_t from, int32_t to) {
    int32_t peer = from == context->rank ? to : from;
    if (peer < 0 || peer >= context->size)
        return NULL;
    _Atomic(struct liveshift_clock *) *kept = &context->pairs[2 * peer + (from == context->rank)];
    struct liveshift_clock *clock = atomic_load_explicit(kept, memory_order_acquire);
    if (clock != NULL)
        return clock;
    pthread_mutex_lock(&writing);
    clock = atomic_load(kept);
    if (clock == NULL && (clock = clock_add(gate, context->row, from, to)) != NULL)
        atomic_store_explicit(kept, clock, memory_order_release);
    pthread_mutex_unlock(&writing);
    return clock;
}
