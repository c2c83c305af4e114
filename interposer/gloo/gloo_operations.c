/* SPDX-License-Identifier: Apache-2.0 */
#include "gloo_operations.h"

/* The table's size, more than a program has buffers at a time. A search begins at the first entry,
   since usually only a few are used. */
#define MOST 4096

static struct gloo_operation operations[MOST];
static _Atomic unsigned in_flight; /* written under `operations_lock`, read without it */
static pthread_mutex_t operations_lock = PTHREAD_MUTEX_INITIALIZER;

static void begin_child(void) { atomic_store(&in_flight, 0); }

AT_FORK_LOCKED(FORK_OPERATIONS, operations_lock, begin_child)

bool gloo_operations_add(const struct gloo_operation *operation) {
    pthread_mutex_lock(&operations_lock);
    unsigned n = atomic_load(&in_flight);
    if (n < MOST) {
        operations[n] = *operation;
        atomic_store(&in_flight, n + 1);
    }
    pthread_mutex_unlock(&operations_lock);
    return n < MOST;
}

/* Removes an entry, under `operations_lock`: the last entry moves into its place. */
static void remove_entry(unsigned at) {
    unsigned last = atomic_load(&in_flight) - 1;
    operations[at] = operations[last];
    atomic_store(&in_flight, last);
}

/* Ends an operation, under `operations_lock`, so that gloo_operations_drop can't free the clock's
   row meanwhile. */
static void complete(const struct gloo_operation *operation, int32_t peer) {
    struct liveshift_clock *clock = operation->clock;
    if (clock == NULL && peer >= 0 && peer < operation->context->size) {
        clock = atomic_load(&operation->context->pairs[2 * peer]);
        if (clock != NULL) {
            atomic_fetch_add_explicit(&operation->context->row->operations, 1,
                                      memory_order_relaxed);
            gate_announce(current_gate(), clock, GLOO_recv, operation->tid);
        }
    }
    if (clock != NULL)
        gate_end(clock);
}

void gloo_operations_complete(const void *buffer, bool sending, int32_t peer) {
    bool found = false;
    if (atomic_load(&in_flight) == 0) /* every part of a collective comes here */
        return;
    pthread_mutex_lock(&operations_lock);
    for (unsigned at = 0; at < atomic_load(&in_flight) && !found; at++) {
        const struct gloo_operation *operation = &operations[at];
        found = operation->buffer == buffer && operation->sending == sending &&
                (operation->peer == peer || operation->peer == GLOO_ANY_PEER);
        if (found) {
            complete(operation, peer);
            remove_entry(at);
        }
    }
    pthread_mutex_unlock(&operations_lock);
}

/* Ends all operations of a buffer or of a context. Receives from any rank end uncounted. */
static void end_all(const void *buffer, const struct gloo_context *context) {
    if (atomic_load(&in_flight) == 0)
        return;
    pthread_mutex_lock(&operations_lock);
    for (unsigned at = 0; at < atomic_load(&in_flight);) {
        const struct gloo_operation *operation = &operations[at];
        if (operation->buffer != buffer && operation->context != context) {
            at++;
            continue;
        }
        complete(operation, GLOO_ANY_PEER);
        remove_entry(at);
    }
    pthread_mutex_unlock(&operations_lock);
}

void gloo_operations_end_buffer(const void *buffer) { end_all(buffer, NULL); }

void gloo_operations_drop(const struct gloo_context *context) { end_all(NULL, context); }
