/* SPDX-License-Identifier: Apache-2.0 */
/* Point-to-point operations that were begun and have not come to their end yet, by gloo's buffer. */
#ifndef LIVESHIFT_INTERPOSER_GLOO_FLIGHTS_H
#define LIVESHIFT_INTERPOSER_GLOO_FLIGHTS_H

#include "gloo_contexts.h"

#define GLOO_ANY_PEER (-1)

struct gloo_flight {
    const void *buffer;
    struct gloo_context *context;
    struct liveshift_clock *clock; /* NULL: from any; which one is known when it arrives */
    int32_t peer, tid;
    bool sending;
};

/* False where there are too many. */
bool gloo_flights_add(const struct gloo_flight *flight);

/* One of a buffer's has ended, with this peer. False: none is known. */
bool gloo_flights_arrive(const void *buffer, bool sending, int32_t peer);

/* The buffer ends, and what it had in flight. */
void gloo_flights_end(const void *buffer);

/* The context's clocks go away. */
void gloo_flights_drop(const struct gloo_context *context);

#endif
