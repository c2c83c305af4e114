/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests of the gate alone, on a page in memory. Time passes only while a thread waits. Each test
 * has a function that plays the agent and other threads during a wait. There is no memory behind
 * the clocks in use, so a read beyond the table ends the program. This header includes gate.c.
 */
#ifndef LIVESHIFT_TESTS_GATE_FIXTURE_H
#define LIVESHIFT_TESTS_GATE_FIXTURE_H

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

/* If set, each atomic load checks that the gate's lock is held. */
static bool check_locked;

static inline void check_lock_held(void) {
    if (check_locked)
        CHECK_SAME(pthread_mutex_trylock(&gate.lock), EBUSY);
}

static struct timespec now = {1000, 0};
static unsigned waits;            /* how often a thread has waited at the gate */
static unsigned wanted_ms;        /* how long the thread asked to wait */
static unsigned forced_ms;        /* how long it waits instead; 0: as it asked */
static void (*on_wait)(unsigned); /* its argument: the number of the wait, from 1 */

static inline int fake_gettime(clockid_t clock, struct timespec *at) {
    CHECK_SAME(clock, CLOCK_MONOTONIC);
    *at = now;
    return 0;
}

static inline long fake_futex_wait(long number, const void *at, int op, uint32_t value,
                                   const struct timespec *look) {
    CHECK_SAME(number, SYS_futex);
    CHECK(at == (const void *)&page->order.check);
    CHECK_SAME(op, FUTEX_WAIT); /* not FUTEX_PRIVATE: the agent wakes through its own mapping */
    CHECK_SAME(value, atomic_load(&page->order.check));
    CHECK_SAME(look->tv_sec, 0);
    CHECK_SAME(look->tv_nsec % 1000000, 0);
    wanted_ms = (unsigned)(look->tv_nsec / 1000000);
    CHECK(++waits < 10000);
    now.tv_nsec += (forced_ms != 0 ? forced_ms : wanted_ms) * 1000000L;
    now.tv_sec += now.tv_nsec / 1000000000;
    now.tv_nsec %= 1000000000;
    on_wait(waits);
    errno = ETIMEDOUT;
    return -1;
}

#undef atomic_load
#define atomic_load(at) (check_lock_held(), atomic_load_explicit(at, memory_order_seq_cst))
#define clock_gettime(clock, at) fake_gettime(clock, at)
#define syscall(number, at, op, value, look, ...) fake_futex_wait(number, at, op, value, look)

#include "gate/gate.c"

#define ME 11
#define OTHER 12
#define ROWS 64 /* they end at the end of a page of memory */

static inline void give_order_of(uint32_t attempt, uint32_t version, uint32_t want) {
    atomic_store(&page->order.want, want);
    atomic_store(&page->order.attempt, attempt);
    atomic_store(&page->order.version, version);
    atomic_store(&page->order.check, ~(want * 0x01000193u ^ attempt * 0x9e3779b1u ^ version));
}

static inline void give_order(uint32_t want) { give_order_of(7, 3, want); }

/* Resets the page: all clocks are unused, each is of its own communicator, and the gate is open. */
static inline void reset_page(void) {
    memset(page, 0, LIVESHIFT_HEADER_SIZE + ROWS * sizeof *clocks);
    memset(&gate, 0xff, sizeof gate);
    gate_init(&gate, page);
    CHECK(gate.page == page);
    CHECK_SAME(gate.progress, 0);
    CHECK(atomic_load(&gate.callback) == NULL);
    for (int row = 0; row < LIVESHIFT_PAGE_CLOCKS; row++)
        CHECK_SAME(gate.waiting[row], 0);
    atomic_store(&page->clocks, ROWS);
    for (uint32_t row = 0; row < ROWS; row++) {
        atomic_store(&clocks[row].id, 100 + row);
        clocks[row].communicator = row;
    }
    give_order(LIVESHIFT_OPEN);
    waits = forced_ms = 0;
}

static inline void set_owner(uint32_t row, int32_t tid) { atomic_store(&clocks[row].owner, tid); }

static inline void set_clock(uint32_t row, uint64_t announced, uint64_t returned, uint64_t target) {
    atomic_store(&clocks[row].announced, announced);
    atomic_store(&clocks[row].returned, returned);
    atomic_store(&clocks[row].target, target);
}

static inline void check_unlocked(void) {
    CHECK_SAME(pthread_mutex_trylock(&gate.lock), 0);
    pthread_mutex_unlock(&gate.lock);
}

/* Makes the page. There is no memory behind its last clock. */
static inline void make_page(void) {
    alarm(20); /* ends a loop that does not end */
    page = mmap(NULL, LIVESHIFT_PAGE_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    clocks = liveshift_clocks(page);
    size_t used = LIVESHIFT_CLOCKS_AT + ROWS * sizeof *clocks;
    CHECK_SAME(used % (size_t)getpagesize(), 0);
    CHECK_SAME(mprotect(page, used, PROT_READ | PROT_WRITE), 0);
}

#endif
