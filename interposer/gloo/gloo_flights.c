/* SPDX-License-Identifier: Apache-2.0 */
#include "gloo_flights.h"

/* The table's size, more than a program has buffers at a time. A search begins at the first entry,
   since usually only a few are used. */
#define MOST 4096

static struct gloo_flight flights[MOST];
static _Atomic unsigned in_flight; /* written under `changing`, read without it */
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) { pthread_mutex_lock(&changing); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&changing); }

static void after_fork_in_child(void) {
    atomic_store(&in_flight, 0);
    pthread_mutex_unlock(&changing);
}

AT_FORK(FORK_FLIGHTS, before_fork, after_fork_in_parent, after_fork_in_child)

bool gloo_flights_add(const struct gloo_flight *flight) {
    pthread_mutex_lock(&changing);
    unsigned n = atomic_load(&in_flight);
    if (n < MOST) {
        flights[n] = *flight;
        atomic_store(&in_flight, n + 1);
    }
    pthread_mutex_unlock(&changing);
    return n < MOST;
}

/* Removes an entry, under `changing`: the last entry moves into its place. */
static void clear(unsigned at) {
    unsigned last = atomic_load(&in_flight) - 1;
    flights[at] = flights[last];
    atomic_store(&in_flight, last);
}

/* Ends a flight, under `changing`, so that gloo_flights_drop can't free the clock's row
   meanwhile. */
static void end(const struct gloo_flight *f, int32_t peer) {
    struct liveshift_clock *clock = f->clock;
    if (clock == NULL && peer >= 0 && peer < f->context->size) {
        clock = atomic_load(&f->context->pairs[2 * peer]);
        if (clock != NULL) {
            atomic_fetch_add_explicit(&f->context->row->operations, 1, memory_order_relaxed);
            gate_announce(current_gate(), clock, GLOO_recv, f->tid);
        }
    }
    if (clock != NULL)
        gate_end(clock);
}

bool gloo_flights_arrive(const void *buffer, bool sending, int32_t peer) {
    bool found = false;
    if (atomic_load(&in_flight) == 0) /* quick, because every part of a collective comes here */
        return false;
    pthread_mutex_lock(&changing);
    for (unsigned at = 0; at < atomic_load(&in_flight) && !found; at++) {
        const struct gloo_flight *f = &flights[at];
        found = f->buffer == buffer && f->sending == sending &&
                (f->peer == peer || f->peer == GLOO_ANY_PEER);
        if (found) {
            end(f, peer);
            clear(at);
        }
    }
    pthread_mutex_unlock(&changing);
    return found;
}

/* Ends all flights of a buffer or of a context. Receives from any rank end uncounted. */
static void end_all(const void *buffer, const struct gloo_context *context) {
    if (atomic_load(&in_flight) == 0)
        return;
    pthread_mutex_lock(&changing);
    for (unsigned at = 0; at < atomic_load(&in_flight);) {
        const struct gloo_flight *f = &flights[at];
        if (f->buffer != buffer && f->context != context) {
            at++;
            continue;
        }
        end(f, GLOO_ANY_PEER);
        clear(at);
    }
    pthread_mutex_unlock(&changing);
}

void gloo_flights_end(const void *buffer) { end_all(buffer, NULL); }

void gloo_flights_drop(const struct gloo_context *context) { end_all(NULL, context); }
