/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate by itself, on a page of the program's own. Time passes only while a thread waits, and
 * what the agent and other threads do meanwhile is a function of each test. No look goes beyond
 * what a table holds: what follows the clocks in use has no memory. Includes gate.c.
 */
#ifndef LIVESHIFT_TESTS_GATE_ALONE_H
#define LIVESHIFT_TESTS_GATE_ALONE_H

#include "check.h"
#include "gate/gate.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct gate gate;
static struct liveshift_page *page;
static struct liveshift_clock *clocks;

/* Set: whatever is looked at is looked at with the gate's lock held. */
static bool locked_looks;

static inline void looked(void) {
    if (locked_looks)
        CHECK_SAME(pthread_mutex_trylock(&gate.deciding), EBUSY);
}

static struct timespec now = {1000, 0};
static unsigned waits;              /* of a thread at the gate */
static unsigned asked_ms, take_ms;  /* how long it wanted to wait; how long it does; 0: as wanted */
static void (*meanwhile)(unsigned); /* told the number of the wait, from 1 */

static inline int gettime_here(clockid_t clock, struct timespec *at) {
    CHECK_SAME(clock, CLOCK_MONOTONIC);
    *at = now;
    return 0;
}

static inline long wait_here(long number, const void *at, int op, uint32_t value,
                             const struct timespec *look) {
    CHECK_SAME(number, SYS_futex);
    CHECK(at == (const void *)&page->order.check);
    CHECK_SAME(op, FUTEX_WAIT); /* not private: the agent has a mapping of its own */
    CHECK_SAME(value, atomic_load(&page->order.check));
    CHECK_SAME(look->tv_sec, 0);
    CHECK_SAME(look->tv_nsec % 1000000, 0);
    asked_ms = (unsigned)(look->tv_nsec / 1000000);
    CHECK(++waits < 10000);
    now.tv_nsec += (take_ms != 0 ? take_ms : asked_ms) * 1000000L;
    now.tv_sec += now.tv_nsec / 1000000000;
    now.tv_nsec %= 1000000000;
    meanwhile(waits);
    errno = ETIMEDOUT;
    return -1;
}

#undef atomic_load
#define atomic_load(at) (looked(), atomic_load_explicit(at, memory_order_seq_cst))
#define clock_gettime(clock, at) gettime_here(clock, at)
#define syscall(number, at, op, value, look, ...) wait_here(number, at, op, value, look)

#include "gate/gate.c"

#define ME 11
#define OTHER 12
#define ROWS 64 /* end with a page of memory */

static inline void give_of(uint32_t attempt, uint32_t version, uint32_t want) {
    atomic_store(&page->order.want, want);
    atomic_store(&page->order.attempt, attempt);
    atomic_store(&page->order.version, version);
    atomic_store(&page->order.check, ~(want * 0x01000193u ^ attempt * 0x9e3779b1u ^ version));
}

static inline void give(uint32_t want) { give_of(7, 3, want); }

/* A page with clocks that nobody has used, each of a communicator of its own; the gate is open. */
static inline void begin(void) {
    memset(page, 0, LIVESHIFT_HEADER_SIZE + ROWS * sizeof *clocks);
    memset(&gate, 0xff, sizeof gate);
    gate_init(&gate, page);
    CHECK(gate.page == page);
    CHECK_SAME(gate.progress, 0);
    CHECK(atomic_load(&gate.errand) == NULL);
    for (int row = 0; row < LIVESHIFT_PAGE_CLOCKS; row++)
        CHECK_SAME(gate.waiting[row], 0);
    atomic_store(&page->clocks, ROWS);
    for (uint32_t row = 0; row < ROWS; row++) {
        atomic_store(&clocks[row].id, 100 + row);
        clocks[row].communicator = row;
    }
    give(LIVESHIFT_OPEN);
    waits = take_ms = 0;
}

static inline void owner(uint32_t row, int32_t tid) { atomic_store(&clocks[row].owner, tid); }

static inline void stands_at(uint32_t row, uint64_t announced, uint64_t returned, uint64_t target) {
    atomic_store(&clocks[row].announced, announced);
    atomic_store(&clocks[row].returned, returned);
    atomic_store(&clocks[row].target, target);
}

static inline void unlocked(void) {
    CHECK_SAME(pthread_mutex_trylock(&gate.deciding), 0);
    pthread_mutex_unlock(&gate.deciding);
}

/* A page that ends with its last clock: what follows has no memory. */
static inline void make_page(void) {
    alarm(20); /* a look that finds no end */
    page = mmap(NULL, LIVESHIFT_PAGE_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    clocks = liveshift_clocks(page);
    size_t used = LIVESHIFT_CLOCKS_AT + ROWS * sizeof *clocks;
    CHECK_SAME(used % (size_t)getpagesize(), 0);
    CHECK_SAME(mprotect(page, used, PROT_READ | PROT_WRITE), 0);
}

#endif
