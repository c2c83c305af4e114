/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each rule of the gate by itself, on a page of this program's own. Time passes here only while a
 * thread waits, and what the agent and other threads do meanwhile is a function of each test. No
 * look goes beyond what a table holds: what follows the clocks in use has no memory.
 * needs: clocks.c process.c
 */
#include "check.h"
#include "gate.h"

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

static void looked(void) {
    if (locked_looks)
        CHECK_SAME(pthread_mutex_trylock(&gate.deciding), EBUSY);
}

static struct timespec now = {1000, 0};
static unsigned waits;              /* of a thread at the gate */
static unsigned asked_ms, take_ms;  /* how long it wanted to wait; how long it does; 0: as wanted */
static void (*meanwhile)(unsigned); /* told the number of the wait, from 1 */

static int gettime_here(clockid_t clock, struct timespec *at) {
    CHECK_SAME(clock, CLOCK_MONOTONIC);
    *at = now;
    return 0;
}

static long wait_here(long number, const void *at, int op, uint32_t value,
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

#include "gate.c"

#define ME 11
#define OTHER 12
#define ROWS 64 /* end with a page of memory */

static void give_of(uint32_t attempt, uint32_t version, uint32_t want) {
    atomic_store(&page->order.want, want);
    atomic_store(&page->order.attempt, attempt);
    atomic_store(&page->order.version, version);
    atomic_store(&page->order.check, ~(want * 0x01000193u ^ attempt * 0x9e3779b1u ^ version));
}

static void give(uint32_t want) { give_of(7, 3, want); }

/* A page with clocks that nobody has used, each of a communicator of its own; the gate is open. */
static void begin(void) {
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

static void owner(uint32_t row, int32_t tid) { atomic_store(&clocks[row].owner, tid); }

static void stands_at(uint32_t row, uint64_t announced, uint64_t returned, uint64_t target) {
    atomic_store(&clocks[row].announced, announced);
    atomic_store(&clocks[row].returned, returned);
    atomic_store(&clocks[row].target, target);
}

static void unlocked(void) {
    CHECK_SAME(pthread_mutex_trylock(&gate.deciding), 0);
    pthread_mutex_unlock(&gate.deciding);
}

static void orders(void) {
    begin();
    give_of(21, 22, LIVESHIFT_TARGET);
    uint32_t attempt = 0, version = 0;
    CHECK_SAME(gate_order(page, &attempt, &version), LIVESHIFT_TARGET);
    CHECK_SAME(attempt, 21);
    CHECK_SAME(version, 22);
    /* One that is being written is not believed, least of all that the gate is open. */
    atomic_store(&page->order.want, LIVESHIFT_OPEN);
    CHECK_SAME(gate_order(page, &attempt, &version), LIVESHIFT_ARMED);
}

static void tables(void) {
    begin();
    CHECK_SAME(row_of(&gate, 100), 0);
    CHECK_SAME(row_of(&gate, 100 + ROWS - 1), ROWS - 1);
    CHECK_SAME(row_of(&gate, 1), UINT32_MAX);
    CHECK_SAME(clocks_used(page), ROWS);
    atomic_store(&page->clocks, LIVESHIFT_PAGE_CLOCKS + 1);
    CHECK_SAME(clocks_used(page), LIVESHIFT_PAGE_CLOCKS);

    stands_at(1, 5, 0, 0);
    gate.waiting[1] = 2;
    CHECK_SAME(admitted(&gate, 1), 3);
    gate.waiting[1] = 6; /* counted before it could be seen announced */
    CHECK_SAME(admitted(&gate, 1), 0);
}

static void unowned_debts(void) {
    begin();
    CHECK_SAME(unowned(&gate, 2, ME), OWN); /* nobody came here yet */
    owner(5, OTHER);
    CHECK_SAME(unowned(&gate, 2, ME), ANOTHERS);
    owner(2, ME);
    CHECK_SAME(unowned(&gate, 2, ME), OWN); /* it has used this communicator */
    owner(2, OTHER);
    owner(3, ME);
    CHECK_SAME(unowned(&gate, 2, ME), ANOTHERS); /* it has used another one */
    owner(2, 0);
    CHECK_SAME(unowned(&gate, 2, ME), ANOTHERS); /* one of two threads: which is not known */

    begin();
    owner(0, OTHER);
    CHECK_SAME(unowned(&gate, 0, ME), ANOTHERS);
    atomic_store(&clocks[0].id, 0); /* a row that was given up */
    CHECK_SAME(unowned(&gate, 0, ME), OWN);
    owner(ROWS - 1, OTHER);
    CHECK_SAME(unowned(&gate, ROWS - 1, ME), ANOTHERS);
}

static void debts(void) {
    begin();
    CHECK_SAME(debt_of(&gate, ME), NONE);
    for (uint32_t row = 0; row < ROWS; row += ROWS - 1) {
        stands_at(row, 4, 4, 4);
        CHECK_SAME(debt_of(&gate, ME), NONE);
        stands_at(row, 4, 4, 5);
        CHECK_SAME(debt_of(&gate, ME), OWN); /* there is no other thread */
        owner(row, OTHER);
        CHECK_SAME(debt_of(&gate, ME), ANOTHERS);
        CHECK_SAME(debt_of(&gate, OTHER), OWN);
        stands_at(1, 0, 0, 1);
        owner(1, ME);
        CHECK_SAME(debt_of(&gate, ME), OWN); /* besides the other's */
        stands_at(1, 1, 0, 1);
        CHECK_SAME(debt_of(&gate, ME), ANOTHERS);
        owner(row, 0);
        owner(1, OTHER); /* the only thread there is */
        CHECK_SAME(debt_of(&gate, ME), ANOTHERS);
        CHECK_SAME(debt_of(&gate, OTHER), OWN);
        owner(1, 0);
        atomic_store(&clocks[row].id, 0);
        CHECK_SAME(debt_of(&gate, ME), NONE); /* a row that was given up owes nothing */
        atomic_store(&clocks[row].id, 1);
        CHECK_SAME(debt_of(&gate, ME), OWN);
        stands_at(row, 0, 0, 0);
        stands_at(1, 0, 0, 0);
    }

    /* On clocks that are not there yet. */
    begin();
    atomic_store(&page->asks[0].id, 1);
    CHECK_SAME(debt_of(&gate, ME), NONE); /* that is of an earlier order */
    atomic_store(&page->order.asked, 1);
    CHECK_SAME(debt_of(&gate, ME), OWN);
    owner(0, OTHER);
    CHECK_SAME(debt_of(&gate, ME), ANOTHERS);
    CHECK_SAME(debt_of(&gate, OTHER), OWN);
    atomic_store(&page->asks[0].id, 100 + 9); /* that clock was made meanwhile */
    CHECK_SAME(debt_of(&gate, ME), NONE);
    CHECK_SAME(debt_of(&gate, OTHER), NONE);
    atomic_store(&page->asks[1].id, 1);
    CHECK_SAME(debt_of(&gate, ME), NONE);
    atomic_store(&page->order.asked, 2);
    CHECK_SAME(debt_of(&gate, ME), ANOTHERS);
    atomic_store(&page->asks[1].communicator, 1);
    owner(1, ME);
    CHECK_SAME(debt_of(&gate, ME), OWN);
    /* More are said to be there than the table holds; behind it lies something that looks so. */
    for (int i = 0; i < LIVESHIFT_PAGE_ASKS; i++)
        atomic_store(&page->asks[i].id, 100);
    size_t behind = offsetof(struct liveshift_page, asks) + sizeof page->asks;
    CHECK(behind + sizeof *page->asks <= LIVESHIFT_HEADER_SIZE);
    memset((char *)page + behind, 1, sizeof *page->asks);
    atomic_store(&page->order.asked, 1000);
    CHECK_SAME(debt_of(&gate, ME), NONE);
}

/* More wants lie in the array than are meant: those of row 9. */
static void several_wants(void) {
    begin();
    struct gate_want wants[3] = {{.clock = 1, .count = 1}, {.clock = 2, .count = 1}, {.clock = 9}};
    wants[2].count = 1;
    stands_at(1, 0, 0, 1);
    stands_at(2, 0, 0, 1);
    CHECK(within_targets(&gate, wants, 2));
    stands_at(1, 0, 0, 0);
    CHECK(!within_targets(&gate, wants, 2));
    stands_at(1, 0, 0, 1);
    stands_at(2, 0, 0, 0);
    CHECK(!within_targets(&gate, wants, 2));
    CHECK(within_targets(&gate, wants, 1));
    stands_at(2, 0, 0, 1);
    wants[1].clock = 1; /* the same clock twice */
    CHECK(!within_targets(&gate, wants, 2));
    stands_at(1, 0, 0, 2);
    CHECK(within_targets(&gate, wants, 2));
    stands_at(1, 1, 1, 2);
    CHECK(!within_targets(&gate, wants, 2));
    wants[1].clock = 2;

    begin();
    clocks[1].blocking = clocks[2].blocking = clocks[9].blocking = 1;
    stands_at(9, 1, 0, 0);
    CHECK(!in_flight(&gate, wants, 2));
    stands_at(1, 5, 5, 0);
    CHECK(!in_flight(&gate, wants, 2));
    stands_at(1, 5, 4, 0);
    CHECK(in_flight(&gate, wants, 2));
    clocks[1].blocking = 0;
    CHECK(!in_flight(&gate, wants, 2));
    stands_at(2, 5, 4, 0);
    CHECK(in_flight(&gate, wants, 2));

    clocks[9].blocking = 0;
    for (int row = 1; row <= 2; row++) {
        clocks[row].blocking = 1;
        clocks[row].from = -1;
    }
    CHECK_SAME(patience_ms(&gate, wants, 2, NONE), GATE_PATIENCE_WORKERS_MS);
    for (int row = 1; row <= 2; row++) {
        clocks[row].from = 0;
        CHECK_SAME(patience_ms(&gate, wants, 2, NONE), GATE_PATIENCE_MS);
        CHECK_SAME(patience_ms(&gate, wants, 2, ANOTHERS), GATE_PATIENCE_WORKERS_MS);
        clocks[row].from = -1;
        clocks[row].blocking = 0;
        CHECK_SAME(patience_ms(&gate, wants, 2, ANOTHERS), GATE_PATIENCE_MS);
        clocks[row].blocking = 1;
    }
}

static void numbers_taken(void) {
    begin();
    struct gate_want wants[3] = {{.clock = 1, .kind = 1, .count = 1, .announced = true},
                                 {.clock = 2, .kind = 2, .count = 3},
                                 {.clock = 9, .kind = 2, .count = 1}};
    struct gate_want *beyond = &wants[2];
    stands_at(1, 1, 0, 1);
    stands_at(2, 0, 0, 3);
    for (int times = 0; times < 2; times++) {
        enter(&gate, wants, 2);
        CHECK_SAME(gate.waiting[1], 1); /* once, how often it tries */
        CHECK_SAME(gate.waiting[2], 0); /* it is not announced yet */
        CHECK(wants[0].entered && !wants[1].entered);
    }
    give(LIVESHIFT_TARGET);
    struct order seen = order_of(page);
    CHECK(take(&gate, wants, 2, ME, &seen, false));
    CHECK_SAME(gate.waiting[1], 0);
    CHECK(!wants[0].entered && !wants[1].entered);
    for (int row = 1; row <= 2; row++) {
        CHECK_SAME(atomic_load(&clocks[row].announced), row == 1 ? 1 : 3);
        CHECK_SAME(atomic_load(&clocks[row].owner), ME);
        CHECK_SAME(atomic_load(&clocks[row].kind), row);
        CHECK_SAME(atomic_load(&clocks[row].raised), 0);
    }
    CHECK_SAME(atomic_load(&page->counters[1].started), 0); /* where it was announced */
    CHECK_SAME(atomic_load(&page->counters[2].started), 3);
    CHECK_SAME(atomic_load(&page->answer.changes), 0); /* as the targets allow */
    CHECK_SAME(gate.progress, 1);

    /* Beyond the targets: it says how far, to the agent that reads meanwhile too, once. */
    atomic_store(&clocks[1].announced, 2);
    enter(&gate, wants, 2);
    CHECK(take(&gate, wants, 2, ME, &seen, false));
    CHECK_SAME(atomic_load(&clocks[1].raised), 2);
    CHECK_SAME(atomic_load(&clocks[2].raised), 6);
    CHECK_SAME(atomic_load(&page->answer.changes), 1);
    CHECK_SAME(gate.progress, 2);
    atomic_store(&clocks[2].announced, 3);
    CHECK(take(&gate, &wants[1], 1, ME, &seen, false));
    CHECK_SAME(atomic_load(&page->answer.changes), 1); /* it is known to be that far */

    /* Another order: all is as before, but for the raised target. */
    struct order old = {.want = LIVESHIFT_TARGET, .attempt = 6, .version = 3};
    atomic_store(&clocks[1].announced, 3);
    enter(&gate, wants, 2);
    owner(1, OTHER);
    owner(2, OTHER);
    CHECK(!take(&gate, wants, 2, ME, &old, false));
    CHECK_SAME(gate.waiting[1], 1);
    CHECK(wants[0].entered);
    CHECK_SAME(atomic_load(&clocks[1].announced), 3);
    CHECK_SAME(atomic_load(&clocks[2].announced), 6);
    CHECK_SAME(atomic_load(&clocks[1].raised), 3);
    CHECK_SAME(atomic_load(&clocks[1].owner), OTHER);
    CHECK_SAME(atomic_load(&clocks[2].owner), OTHER);
    CHECK_SAME(gate.progress, 3);

    /* With the gate open nothing is raised, and no thread waits for progress. */
    uint32_t changes = atomic_load(&page->answer.changes);
    give(LIVESHIFT_OPEN);
    seen = order_of(page);
    CHECK(take(&gate, wants, 2, ME, &seen, true));
    CHECK_SAME(atomic_load(&clocks[1].raised), 3);
    CHECK_SAME(atomic_load(&clocks[2].announced), 9);
    CHECK_SAME(atomic_load(&page->answer.changes), changes);
    CHECK_SAME(gate.progress, 3);
    CHECK_SAME(atomic_load(&clocks[beyond->clock].announced), 0);
    CHECK_SAME(gate.waiting[beyond->clock], 0);
    CHECK_SAME(atomic_load(&clocks[beyond->clock].owner), 0);
    CHECK_SAME(atomic_load(&clocks[beyond->clock].raised), 0);

    /* Nor is what lies behind what is wanted touched where nothing is taken. */
    give(LIVESHIFT_TARGET);
    beyond->announced = true;
    enter(&gate, wants, 2);
    CHECK(!beyond->entered);
    CHECK(!take(&gate, wants, 2, ME, &old, false));
    CHECK_SAME(gate.waiting[beyond->clock], 0);
}

static void leases(void) {
    begin();
    struct gate_visit visit = {.beat = 5};
    atomic_store(&page->order.beat, 5);
    give(LIVESHIFT_CLOSED);
    struct order o = order_of(page);
    visit.silent_ms = 9;
    CHECK(!lease_is_over(&gate, &o, &visit)); /* there is none */
    atomic_store(&page->order.lease_ms, 10);
    CHECK(!lease_is_over(&gate, &o, &visit));
    visit.silent_ms = 10;
    CHECK(lease_is_over(&gate, &o, &visit));
    o.want = LIVESHIFT_TEARDOWN; /* from there on the agent's silence opens nothing */
    CHECK(!lease_is_over(&gate, &o, &visit));
    o.want = LIVESHIFT_CLOSED;
    atomic_store(&page->answer.down, 1);
    CHECK(!lease_is_over(&gate, &o, &visit));
    atomic_store(&page->answer.down, 0);
    atomic_store(&page->order.lease_ms, 1);
    visit.silent_ms = 1;
    CHECK(lease_is_over(&gate, &o, &visit));
    atomic_store(&page->order.beat, 6); /* a sign of life */
    CHECK(!lease_is_over(&gate, &o, &visit));
    CHECK_SAME(visit.silent_ms, 0);
    CHECK_SAME(visit.beat, 6);
    visit.silent_ms = 1;
    CHECK(lease_is_over(&gate, &o, &visit));
}

static struct gate_want want;

static enum gate_verdict try_with(struct gate_visit visit) {
    want = (struct gate_want){.clock = 1, .kind = 1, .count = 1};
    locked_looks = true;
    enum gate_verdict verdict = gate_try(&gate, &want, 1, ME, &visit);
    locked_looks = false;
    unlocked();
    return verdict;
}

static void verdicts(void) {
    const struct gate_visit fresh = {0};
    begin();
    CHECK_SAME(try_with(fresh), GATE_GO);
    CHECK_SAME(gate.progress, 0);
    for (uint32_t order = LIVESHIFT_ARMED; order <= LIVESHIFT_DEVICES; order++) {
        give(order);
        if (order != LIVESHIFT_TARGET)
            CHECK_SAME(try_with(fresh), order == LIVESHIFT_ARMED ? GATE_ARMED : GATE_SHUT);
    }
    atomic_store(&page->answer.reopened, 6); /* of another attempt */
    CHECK_SAME(try_with(fresh), GATE_SHUT);
    atomic_store(&page->answer.reopened, 7);
    CHECK_SAME(try_with(fresh), GATE_GO);
    CHECK_SAME(gate.progress, 0);
    atomic_store(&page->answer.reopened, 0);
    CHECK_SAME(atomic_load(&clocks[1].announced), 2);

    begin();
    atomic_store(&page->order.lease_ms, 10);
    CHECK_SAME(try_with((struct gate_visit){.silent_ms = 10}), GATE_GO);
    CHECK_SAME(atomic_load(&page->answer.reopened), 0); /* it is open */
    give(LIVESHIFT_CLOSED);
    CHECK_SAME(try_with((struct gate_visit){.silent_ms = 9}), GATE_SHUT);
    CHECK_SAME(atomic_load(&page->answer.reopened), 0);
    CHECK_SAME(try_with((struct gate_visit){.silent_ms = 10}), GATE_GO);
    CHECK_SAME(atomic_load(&page->answer.reopened), 7);

    begin();
    give(LIVESHIFT_TARGET);
    stands_at(1, 0, 0, 1);
    CHECK_SAME(try_with(fresh), GATE_GO);
    CHECK_SAME(atomic_load(&clocks[1].raised), 0);
    CHECK_SAME(try_with(fresh), GATE_PARK); /* beyond its target, and nothing is owed */
    const struct gate_visit impatient = {.progress = 1, .stalled_ms = GATE_PATIENCE_MS};
    CHECK_SAME(gate.progress, 1);
    CHECK_SAME(try_with(impatient), GATE_PARK); /* one that only enqueues waits for no peers */
    clocks[1].blocking = 1;
    clocks[1].from = 0;
    CHECK_SAME(try_with((struct gate_visit){.progress = 1, .stalled_ms = GATE_PATIENCE_MS - 1}),
               GATE_PARK);
    CHECK_SAME(try_with(impatient), GATE_GO); /* the one before it is in flight */
    CHECK_SAME(atomic_load(&clocks[1].raised), 2);
    atomic_store(&clocks[1].returned, 2);
    CHECK_SAME(gate.progress, 2);
    CHECK_SAME(try_with((struct gate_visit){.progress = 2, .stalled_ms = GATE_PATIENCE_MS}),
               GATE_PARK);

    begin();
    give(LIVESHIFT_TARGET);
    stands_at(2, 0, 0, 1);
    owner(2, ME);
    CHECK_SAME(try_with(fresh), GATE_GO); /* its own debt comes later in its program */
    CHECK_SAME(atomic_load(&clocks[1].raised), 1);
    owner(2, OTHER);
    CHECK_SAME(try_with(fresh), GATE_OWED);
    CHECK_SAME(try_with((struct gate_visit){.progress = 1, .stalled_ms = GATE_PATIENCE_MS - 1}),
               GATE_OWED);
    CHECK_SAME(try_with((struct gate_visit){.owed_ms = GATE_OWED_MS - 1}), GATE_OWED);
    CHECK_SAME(gate.progress, 1);
    struct gate_visit behind = impatient;
    behind.progress = 0; /* a number was given out since */
    want = (struct gate_want){.clock = 1, .kind = 1, .count = 1};
    CHECK_SAME(gate_try(&gate, &want, 1, ME, &behind), GATE_OWED);
    CHECK_SAME(behind.stalled_ms, 0);
    CHECK_SAME(behind.progress, 1);
    CHECK_SAME(try_with(impatient), GATE_GO);
    CHECK_SAME(atomic_load(&clocks[1].raised), 2);
    CHECK_SAME(try_with((struct gate_visit){.owed_ms = GATE_OWED_MS}), GATE_GO);
    CHECK_SAME(atomic_load(&clocks[1].raised), 3);

    /* What waits here announced is counted so, and is not any more when it has passed. */
    begin();
    give(LIVESHIFT_CLOSED);
    struct gate_visit visit = fresh;
    want = (struct gate_want){.clock = 1, .kind = 1, .count = 1, .announced = true};
    atomic_store(&clocks[1].announced, 1);
    CHECK_SAME(gate_try(&gate, &want, 1, ME, &visit), GATE_SHUT);
    CHECK_SAME(gate.waiting[1], 1);
    give(LIVESHIFT_OPEN);
    CHECK_SAME(gate_try(&gate, &want, 1, ME, &visit), GATE_GO);
    CHECK_SAME(gate.waiting[1], 0);
}

/* A thread that opens the gate decides under the same lock: one of the two sees the other. */
static void held_shut(void) {
    begin();
    atomic_store(&page->answer.reopened, 6);
    locked_looks = true;
    CHECK(gate_hold_shut(&gate, 7));
    locked_looks = false;
    unlocked();
    CHECK_SAME(atomic_load(&page->answer.down), 1);
    atomic_store(&page->answer.down, 0);
    CHECK(!gate_hold_shut(&gate, 6));
    CHECK_SAME(atomic_load(&page->answer.down), 0);
    unlocked();
}

static uint32_t took(time_t s, long ns, uint32_t most) {
    const struct timespec since = {now.tv_sec - s, now.tv_nsec - ns};
    return elapsed_ms(&since, most);
}

static void times(void) {
    now = (struct timespec){1000, 999999999};
    CHECK_SAME(took(3, 0, 100000), 3000);
    CHECK_SAME(took(0, 0, 20), 0);
    CHECK_SAME(took(0, 1, 20), 1); /* each look counts */
    CHECK_SAME(took(0, 1000000, 20), 1);
    CHECK_SAME(took(0, 1000001, 20), 2);
    CHECK_SAME(took(0, 999000000, 1000), 999);
    CHECK_SAME(took(1, 999000000, 20), 20); /* it was frozen meanwhile */
    CHECK_SAME(took(-1, 0, 20), 0);
    now = (struct timespec){1001, 0};
    uint32_t over_a_second = took(1, -980000000, 100);
    CHECK(over_a_second == 20 || over_a_second == 21);
}

static unsigned seated(void) {
    unsigned found = 0;
    for (int i = 0; i < LIVESHIFT_PAGE_THREADS; i++)
        found += atomic_load(&page->threads[i].tid) != 0;
    return found;
}

static uint32_t state(void) { return atomic_load(&page->threads[0].state); }

/* What the agent, and whoever asks it where this rank's threads are, see of one that waits. */
static void check_row(void) {
    const struct liveshift_thread *row = &page->threads[0];
    CHECK_SAME(seated(), 1);
    CHECK_SAME(atomic_load(&row->tid), ME);
    CHECK_SAME(atomic_load(&row->clock), 1);
    CHECK_SAME(atomic_load(&row->wants), 2);
    CHECK_SAME(atomic_load(&row->kind), 2);
}

static unsigned errands;

static void errand(uint32_t kind) {
    CHECK_SAME(kind, 2);
    errands++;
}

static void closed_then_targets(unsigned wait) {
    check_row();
    const struct {
        uint32_t now, next;
    } seen[] = {{'A', LIVESHIFT_TARGET},
                {'P', LIVESHIFT_CLOSED},
                {'C', LIVESHIFT_CLOSED},
                {'C', LIVESHIFT_TARGET},
                {'O', LIVESHIFT_OPEN}};
    CHECK(wait <= sizeof seen / sizeof *seen);
    CHECK_SAME(state(), seen[wait - 1].now);
    CHECK_SAME(errands, wait < 3 ? 0 : wait == 3 ? 1 : 2);
    bool looking = state() == 'P' || state() == 'O';
    CHECK_SAME(asked_ms, looking ? GATE_PATIENCE_WORKERS_MS : 20);
    if (wait == 4) { /* another rank was further */
        owner(5, OTHER);
        stands_at(5, 0, 0, 1);
    }
    give(seen[wait - 1].next);
}

static void waiting(void) {
    begin();
    struct gate_want wants[] = {{.clock = 1, .kind = 2, .count = 1},
                                {.clock = 2, .kind = 1, .count = 1},
                                {.clock = 9, .kind = 1, .count = 1}};
    atomic_store(&gate.errand, errand);
    give(LIVESHIFT_ARMED);
    meanwhile = closed_then_targets;
    errno = EDOM;
    gate_pass(&gate, wants, 2, ME);
    CHECK_SAME(errno, EDOM);
    CHECK_SAME(waits, 5);
    CHECK_SAME(seated(), 0);
    CHECK_SAME(atomic_load(&clocks[2].announced), 1);
    gate_pass(&gate, wants, 2, ME); /* open: it does not wait, nor is it seen */
    CHECK_SAME(waits, 5);
    CHECK_SAME(atomic_load(&clocks[2].announced), 2);
}

/* Woken each millisecond, after one with the gate armed. */
static void aim_first(unsigned wait) {
    if (wait == 1)
        give(LIVESHIFT_TARGET);
}

static void aim_and_pass(unsigned wait) {
    aim_first(wait);
    gate.progress++; /* another thread goes on */
}

static void patience(void) {
    struct gate_want one = {.clock = 1, .kind = 2, .count = 1};
    for (int others_pass = 0; others_pass < 2; others_pass++) {
        begin();
        stands_at(5, 0, 0, 1);
        owner(5, OTHER);
        give(LIVESHIFT_ARMED);
        take_ms = 1;
        meanwhile = others_pass ? aim_and_pass : aim_first;
        gate_pass(&gate, &one, 1, ME);
        CHECK_SAME(waits, 1 + (others_pass ? GATE_OWED_MS : GATE_PATIENCE_MS));
        CHECK_SAME(atomic_load(&clocks[1].raised), 1);
    }
}

static void look_less_often(unsigned wait) {
    CHECK_SAME(state(), 'P');
    CHECK_SAME(asked_ms, wait <= GATE_PATIENCE_MS ? GATE_PATIENCE_WORKERS_MS : 20);
    if (wait == GATE_PATIENCE_MS + 3)
        give(LIVESHIFT_OPEN);
}

/* Closed, after it has looked for a while, which does not count afterwards. */
static void close_between(unsigned wait) {
    const unsigned closed = GATE_PATIENCE_MS - 1;
    if (wait == closed)
        give(LIVESHIFT_CLOSED);
    if (wait == closed + 1)
        give(LIVESHIFT_TARGET);
}

static void parked(void) {
    struct gate_want one = {.clock = 1, .kind = 2, .count = 1};
    begin();
    give(LIVESHIFT_TARGET);
    take_ms = 1;
    meanwhile = look_less_often;
    gate_pass(&gate, &one, 1, ME);
    CHECK_SAME(waits, GATE_PATIENCE_MS + 3);

    begin();
    stands_at(5, 0, 0, 1);
    owner(5, OTHER);
    give(LIVESHIFT_TARGET);
    take_ms = 1;
    meanwhile = close_between;
    gate_pass(&gate, &one, 1, ME);
    CHECK_SAME(waits, GATE_PATIENCE_MS + GATE_PATIENCE_MS);
}

static void beat_once(unsigned wait) {
    if (wait == 30)
        atomic_store(&page->order.beat, 1);
}

/* The agent falls silent; and no row is free. */
static void silence(void) {
    struct gate_want one = {.clock = 1, .kind = 2, .count = 1};
    for (int others = 0; others <= LIVESHIFT_PAGE_THREADS; others += LIVESHIFT_PAGE_THREADS) {
        begin();
        for (int i = 0; i < others; i++)
            atomic_store(&page->threads[i].tid, 1000 + i);
        atomic_store(&page->order.lease_ms, 60);
        give(LIVESHIFT_CLOSED);
        take_ms = 1;
        meanwhile = beat_once;
        gate_pass(&gate, &one, 1, ME);
        CHECK_SAME(waits, 30 + 60);
        CHECK_SAME(atomic_load(&page->answer.reopened), 7);
        CHECK_SAME(seated(), others);
        for (size_t i = 0; i < sizeof page->counters[0].kind; i++)
            CHECK_SAME(page->counters[0].kind[i], 0); /* that lies behind the threads' rows */
    }
}

static void sees_one_waiting(unsigned wait) {
    CHECK_SAME(wait, 1);
    CHECK_SAME(atomic_load(&page->threads[0].wants), 1);
    CHECK_SAME(atomic_load(&page->threads[0].clock), 2);
    CHECK_SAME(atomic_load(&page->threads[0].kind), 1);
    CHECK_SAME(gate.waiting[2], 1);
    stands_at(2, 2, 1, 2);
    give_of(7, 4, LIVESHIFT_TARGET);
}

static void fast_path(void) {
    begin();
    gate_begin(&gate, &clocks[2], 1, ME);
    give(LIVESHIFT_TARGET);
    stands_at(2, 1, 1, 1);
    meanwhile = sees_one_waiting;
    gate_begin(&gate, &clocks[2], 1, ME);
    CHECK_SAME(waits, 1);
    CHECK_SAME(atomic_load(&clocks[2].announced), 2);
    CHECK_SAME(atomic_load(&clocks[2].raised), 0);
    CHECK_SAME(atomic_load(&page->counters[1].started), 2);
    CHECK_SAME(gate.waiting[2], 0);

    begin();
    CHECK(gate_group_begin(&gate));
    CHECK_SAME(atomic_load(&page->answer.groups), 1);
    gate_group_end(&gate);
    CHECK_SAME(atomic_load(&page->answer.groups), 0);
    give(LIVESHIFT_ARMED);
    CHECK(!gate_group_begin(&gate));
    CHECK_SAME(atomic_load(&page->answer.groups), 0);
    gate_untracked_begin(&gate);
    CHECK_SAME(atomic_load(&page->answer.untracked), 1);
    gate_untracked_end(&gate);
    CHECK_SAME(atomic_load(&page->answer.untracked), 0);
}

int main(int argc, char **argv) {
    CHECK(argc == 3 && argv[2] != NULL);
    alarm(20); /* a look that finds no end */
    page = mmap(NULL, LIVESHIFT_PAGE_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    clocks = liveshift_clocks(page);
    size_t used = LIVESHIFT_CLOCKS_AT + ROWS * sizeof *clocks;
    CHECK_SAME(used % (size_t)getpagesize(), 0);
    CHECK_SAME(mprotect(page, used, PROT_READ | PROT_WRITE), 0);
    orders();
    tables();
    unowned_debts();
    debts();
    several_wants();
    numbers_taken();
    leases();
    verdicts();
    held_shut();
    times();
    waiting();
    patience();
    parked();
    silence();
    fast_path();
    return 0;
}
