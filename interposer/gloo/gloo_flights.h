/* SPDX-License-Identifier: Apache-2.0 */
/* Flights: point-to-point operations that have begun and not ended yet, found by gloo's buffer. */
#ifndef LIVESHIFT_INTERPOSER_GLOO_FLIGHTS_H
#define LIVESHIFT_INTERPOSER_GLOO_FLIGHTS_H

#include "gloo_contexts.h"

#define GLOO_ANY_PEER (-1)

struct gloo_flight {
    const void *buffer;
    struct gloo_context *context;
    struct liveshift_clock *clock; /* NULL: a receive from any rank, until it arrives */
    int32_t peer, tid;
    bool sending;
};

/* Adds a flight. False: there are too many. */
bool gloo_flights_add(const struct gloo_flight *flight);

/* One flight of this buffer with this peer has ended. False: no such flight is known. */
bool gloo_flights_arrive(const void *buffer, bool sending, int32_t peer);

/* The buffer ends, and its flights with it. */
void gloo_flights_end(const void *buffer);

/* Drops the flights of a context whose clocks go away. */
void gloo_flights_drop(const struct gloo_context *context);

#endif
