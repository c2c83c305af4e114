/* SPDX-License-Identifier: Apache-2.0 */
/* The page's rows of communicators and clocks. */
#ifndef LIVESHIFT_INTERPOSER_CLOCKS_H
#define LIVESHIFT_INTERPOSER_CLOCKS_H

#include "process.h"

/* What the caller says about a new communicator; see struct liveshift_communicator. */
struct communicator_info {
    enum liveshift_library library;
    uint64_t id, parent;
    int32_t size, rank, device;
    char made_by;
    const char *name; /* may be NULL */
    bool pending;     /* not complete yet: the agent sees its clocks, but not its row */
};

/* communicator_add makes a communicator's row, clock_add the row of one of its clocks. NULL: the
   table is full or has no storage (one line on stderr says so). Then the communicator's operations
   pass the gate and count as unidentified. */
struct liveshift_communicator *communicator_add(struct gate *gate,
                                                const struct communicator_info *made);
struct liveshift_clock *clock_add(struct gate *gate, struct liveshift_communicator *of,
                                  int32_t from, int32_t to);

/* The application has ended the communicator: marks its row, and frees the rows of its clocks. */
void communicator_end(struct gate *gate, struct liveshift_communicator *row);

/* A clock's id, which is the same on all members. `from` and `to` are -1 for collectives. */
uint64_t clock_id(uint64_t communicator, int32_t from, int32_t to);

/* FNV-1a, 64 bits, continued from `seed` (0 to begin); never 0. */
uint64_t hash64(uint64_t seed, const void *bytes, size_t length);

/* Counts the end of an operation that belongs to no clock that other ranks could know. */
static inline void unidentified_end(struct gate *gate) {
    atomic_fetch_add_explicit(&gate->page->answer.unidentified, 1, memory_order_relaxed);
}

#endif
