/* SPDX-License-Identifier: Apache-2.0 */
/* What the hooks need to know about counting: say that a call begins, say that it came back. */
#ifndef LIVESHIFT_INTERPOSER_COUNTING_H
#define LIVESHIFT_INTERPOSER_COUNTING_H

#include "entry_points.h"

struct liveshift_page;

/* One collective in flight. It remembers its page, so that both counts go to the same one. */
struct call {
    struct liveshift_page *page;
    enum collective_kind kind;
};

/* Counts one call as begun, making this process's page if it is the first. Never fails: where no
   page can be had the calls are counted where nobody looks. */
struct call call_started(enum collective_kind kind);

/* Counts it as having come back. Shaped for __attribute__((cleanup)). */
void call_finished(const struct call *call);

#endif
