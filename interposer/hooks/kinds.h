/* SPDX-License-Identifier: Apache-2.0 */
/* enum kind has every operation that the interposer counts; each is an index into the page's
   counters. */
#ifndef LIVESHIFT_INTERPOSER_KINDS_H
#define LIVESHIFT_INTERPOSER_KINDS_H

#include "entry_points.h"
#include "nccl/nccl_operations.h"

enum kind {
#define X(name, symbol, need) GLOO_##name,
    LIVESHIFT_GLOO_ENTRY_POINTS(X)
#undef X
        GLOO_send,
    GLOO_recv,
#define X(name) NCCL_##name,
    LIVESHIFT_NCCL_OPERATIONS(X)
#undef X
        KINDS
};

#endif
