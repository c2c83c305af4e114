/* SPDX-License-Identifier: Apache-2.0 */
/* The table of point-to-point operations that are in flight, by gloo's buffer. */
#ifndef LIVESHIFT_INTERPOSER_GLOO_OPERATIONS_H
#define LIVESHIFT_INTERPOSER_GLOO_OPERATIONS_H

#include "gloo_contexts.h"

#define GLOO_ANY_PEER (-1)

struct gloo_operation {
    const void *buffer;
    struct gloo_context *context;
    struct liveshift_clock *clock; /* NULL: a receive from any rank, until it arrives */
    int32_t peer, tid;
    bool sending;
};

/* Adds an operation. False: there are too many. */
bool gloo_operations_add(const struct gloo_operation *operation);

/* One operation of this buffer with this peer has ended, if the table has one. */
void gloo_operations_complete(const void *buffer, bool sending, int32_t peer);

/* The buffer ends, and its operations with it. */
void gloo_operations_end_buffer(const void *buffer);

/* Drops the operations of a context whose clocks go away. */
void gloo_operations_drop(const struct gloo_context *context);

#endif
