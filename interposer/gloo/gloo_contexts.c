/* SPDX-License-Identifier: Apache-2.0 */
#include "gloo_contexts.h"
#include "gloo_operations.h"

#include <stdlib.h>
#include <string.h>

__thread unsigned gloo_depth __attribute__((tls_model("initial-exec")));

struct gloo_slot gloo_slots[GLOO_SLOTS];

/* A slot's key after its context has ended: searches go past the slot, and it can be used again. */
static const char tombstone;

/* Taken to write to the slots, before the locks of the operations, the rows and the page. Held
   across fork(), so that a child never inherits it from a thread that the child doesn't have. */
static pthread_mutex_t slots_lock = PTHREAD_MUTEX_INITIALIZER;

/* Whether there has been a context; under `slots_lock`. */
static bool has_contexts;

/* The child can't use the parent's contexts: both would read from the same connections. If it does
   so all the same, its operations pass unidentified. */
static void begin_child(void) {
    if (has_contexts)
        memset(gloo_slots, 0, sizeof gloo_slots);
    has_contexts = false;
    gloo_depth = 0;
}

AT_FORK_LOCKED(FORK_CONTEXTS, slots_lock, begin_child)

static struct gloo_slot *next(const struct gloo_slot *slot) {
    return &gloo_slots[(slot - gloo_slots + 1) % GLOO_SLOTS];
}

struct gloo_context *gloo_context_of(const void *key) {
    const struct gloo_slot *slot = gloo_slot_at(key);
    for (size_t n = 0; n < GLOO_SLOTS; n++, slot = next(slot)) {
        const void *seen = atomic_load_explicit(&slot->key, memory_order_acquire);
        if (seen == NULL)
            return NULL;
        if (seen == key)
            return slot->context;
    }
    return NULL;
}

/* The key's slot, or the first that it can have. */
static struct gloo_slot *slot_for(const void *key) {
    struct gloo_slot *free = NULL, *slot = &gloo_slots[gloo_slot_at(key) - gloo_slots];
    for (size_t n = 0; n < GLOO_SLOTS; n++, slot = next(slot)) {
        const void *seen = atomic_load(&slot->key);
        if (seen == key)
            return slot;
        if (free == NULL && (seen == NULL || seen == &tombstone))
            free = slot;
        if (seen == NULL)
            break;
    }
    return free;
}

/* Under `slots_lock`. */
static void remove_context(struct gate *gate, struct gloo_context *context) {
    for (unsigned i = 0; i < 2; i++) {
        struct gloo_slot *slot = context->keys[i] != NULL ? slot_for(context->keys[i]) : NULL;
        if (slot != NULL && slot->context == context)
            atomic_store(&slot->key, (const void *)&tombstone);
    }
    gloo_operations_drop(context);
    communicator_end(gate, context->row);
    free(context);
}

struct gloo_context *gloo_context_add(struct gate *gate, const struct communicator_info *made,
                                      const void *const keys[2]) {
    size_t pairs = 2 * (size_t)made->size;
    struct gloo_context *context = calloc(1, sizeof *context + pairs * sizeof context->pairs[0]);
    if (context == NULL)
        return NULL;
    context->gate = gate;
    context->rank = made->rank;
    context->size = made->size;
    pthread_mutex_lock(&slots_lock);
    has_contexts = true;
    context->row = communicator_add(gate, made);
    if (context->row != NULL && made->id != 0)
        context->clock = clock_add(gate, context->row, -1, -1);
    for (unsigned i = 0; i < 2 && context->row != NULL; i++) {
        struct gloo_slot *slot = keys[i] != NULL ? slot_for(keys[i]) : NULL;
        if (slot == NULL)
            continue;
        if (atomic_load(&slot->key) == keys[i]) /* we did not see its predecessor's end */
            remove_context(gate, slot->context);
        context->keys[i] = keys[i];
        slot->context = context;
        atomic_store_explicit(&slot->key, keys[i], memory_order_release);
    }
    pthread_mutex_unlock(&slots_lock);
    if (context->row != NULL)
        return context;
    free(context);
    return NULL;
}

void gloo_context_end(struct gate *gate, const void *key) {
    pthread_mutex_lock(&slots_lock);
    struct gloo_context *context = gloo_context_of(key);
    if (context != NULL)
        remove_context(gate, context);
    pthread_mutex_unlock(&slots_lock);
}

struct liveshift_clock *gloo_pair_clock(struct gate *gate, struct gloo_context *context,
                                        int32_t from, int32_t to) {
    int32_t peer = from == context->rank ? to : from;
    if (context->clock == NULL || peer < 0 || peer >= context->size)
        return NULL;
    _Atomic(struct liveshift_clock *) *place = &context->pairs[2 * peer + (from == context->rank)];
    struct liveshift_clock *clock = atomic_load_explicit(place, memory_order_acquire);
    if (clock != NULL)
        return clock;
    pthread_mutex_lock(&slots_lock);
    clock = atomic_load(place);
    if (clock == NULL && (clock = clock_add(gate, context->row, from, to)) != NULL)
        atomic_store_explicit(place, clock, memory_order_release);
    pthread_mutex_unlock(&slots_lock);
    return clock;
}
