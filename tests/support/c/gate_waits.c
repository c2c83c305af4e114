/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests how a thread waits at the gate: how long, what its row in the page shows, and what wakes it
 * (gate_fixture.h).
 * needs: gate/clocks.c gate/process.c
 */
#include "gate_fixture.h"

static uint32_t took(time_t s, long ns, uint32_t most) {
    const struct timespec since = {now.tv_sec - s, now.tv_nsec - ns};
    return elapsed_ms(&since, most);
}

static void times(void) {
    now = (struct timespec){1000, 999999999};
    CHECK_SAME(took(3, 0, 100000), 3000);
    CHECK_SAME(took(0, 0, 20), 0);
    CHECK_SAME(took(0, 1, 20), 1); /* each wait counts at least 1 ms */
    CHECK_SAME(took(0, 1000000, 20), 1);
    CHECK_SAME(took(0, 1000001, 20), 2);
    CHECK_SAME(took(0, 999000000, 1000), 999);
    CHECK_SAME(took(1, 999000000, 20), 20); /* it was frozen meanwhile */
    CHECK_SAME(took(-1, 0, 20), 0);
    now = (struct timespec){1001, 0};
    uint32_t over_a_second = took(1, -980000000, 100);
    CHECK(over_a_second == 20 || over_a_second == 21);
}

static unsigned rows_in_use(void) {
    unsigned found = 0;
    for (int i = 0; i < LIVESHIFT_PAGE_THREADS; i++)
        found += atomic_load(&page->threads[i].tid) != 0;
    return found;
}

static uint32_t state(void) { return atomic_load(&page->threads[0].state); }

/* Checks the row that shows the agent where a waiting thread is. */
static void check_row(void) {
    const struct liveshift_thread *row = &page->threads[0];
    CHECK_SAME(rows_in_use(), 1);
    CHECK_SAME(atomic_load(&row->tid), ME);
    CHECK_SAME(atomic_load(&row->clock), 1);
    CHECK_SAME(atomic_load(&row->wants), 2);
    CHECK_SAME(atomic_load(&row->kind), 2);
}

static unsigned callbacks;

static void callback(uint32_t kind) {
    CHECK_SAME(kind, 2);
    callbacks++;
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
    CHECK_SAME(callbacks, wait < 3 ? 0 : wait == 3 ? 1 : 2);
    bool may_pass_later = state() == 'P' || state() == 'O';
    CHECK_SAME(wanted_ms, may_pass_later ? GATE_STALL_LIMIT_WORKERS_MS : 20);
    if (wait == 4) { /* another rank has begun more */
        set_owner(5, OTHER);
        set_clock(5, 0, 0, 1);
    }
    give_order(seen[wait - 1].next);
}

static void waiting(void) {
    reset_page();
    struct gate_want wants[] = {{.clock = 1, .kind = 2, .count = 1},
                                {.clock = 2, .kind = 1, .count = 1},
                                {.clock = 9, .kind = 1, .count = 1}};
    atomic_store(&gate.callback, callback);
    give_order(LIVESHIFT_ARMED);
    on_wait = closed_then_targets;
    errno = EDOM;
    gate_pass(&gate, wants, 2, ME);
    CHECK_SAME(errno, EDOM);
    CHECK_SAME(waits, 5);
    CHECK_SAME(rows_in_use(), 0);
    CHECK_SAME(atomic_load(&clocks[2].announced), 1);
    gate_pass(&gate, wants, 2,
              ME); /* the gate is open: the thread does not wait and takes no row */
    CHECK_SAME(waits, 5);
    CHECK_SAME(atomic_load(&clocks[2].announced), 2);
}

/* The thread wakes each millisecond; during the first one the gate is armed. */
static void aim_first(unsigned wait) {
    if (wait == 1)
        give_order(LIVESHIFT_TARGET);
}

static void aim_and_pass(unsigned wait) {
    aim_first(wait);
    gate.progress++; /* another thread takes a number */
}

static void time_limits(void) {
    struct gate_want one = {.clock = 1, .kind = 2, .count = 1};
    for (int others_pass = 0; others_pass < 2; others_pass++) {
        reset_page();
        set_clock(5, 0, 0, 1);
        set_owner(5, OTHER);
        give_order(LIVESHIFT_ARMED);
        forced_ms = 1;
        on_wait = others_pass ? aim_and_pass : aim_first;
        gate_pass(&gate, &one, 1, ME);
        CHECK_SAME(waits, 1 + (others_pass ? GATE_PENDING_LIMIT_MS : GATE_STALL_LIMIT_MS));
        CHECK_SAME(atomic_load(&clocks[1].raised), 1);
    }
}

static void poll_less_often(unsigned wait) {
    CHECK_SAME(state(), 'P');
    CHECK_SAME(wanted_ms, wait <= GATE_STALL_LIMIT_MS ? GATE_STALL_LIMIT_WORKERS_MS : 20);
    if (wait == GATE_STALL_LIMIT_MS + 3)
        give_order(LIVESHIFT_OPEN);
}

/* The gate is closed for one wait. The time before that must not count afterwards. */
static void close_between(unsigned wait) {
    const unsigned closed = GATE_STALL_LIMIT_MS - 1;
    if (wait == closed)
        give_order(LIVESHIFT_CLOSED);
    if (wait == closed + 1)
        give_order(LIVESHIFT_TARGET);
}

static void parked(void) {
    struct gate_want one = {.clock = 1, .kind = 2, .count = 1};
    reset_page();
    give_order(LIVESHIFT_TARGET);
    forced_ms = 1;
    on_wait = poll_less_often;
    gate_pass(&gate, &one, 1, ME);
    CHECK_SAME(waits, GATE_STALL_LIMIT_MS + 3);

    reset_page();
    set_clock(5, 0, 0, 1);
    set_owner(5, OTHER);
    give_order(LIVESHIFT_TARGET);
    forced_ms = 1;
    on_wait = close_between;
    gate_pass(&gate, &one, 1, ME);
    CHECK_SAME(waits, GATE_STALL_LIMIT_MS + GATE_STALL_LIMIT_MS);
}

static void heartbeat_once(unsigned wait) {
    if (wait == 30)
        atomic_store(&page->order.heartbeat, 1);
}

/* The agent sends no heartbeat, with free rows and without. */
static void silence(void) {
    struct gate_want one = {.clock = 1, .kind = 2, .count = 1};
    for (int others = 0; others <= LIVESHIFT_PAGE_THREADS; others += LIVESHIFT_PAGE_THREADS) {
        reset_page();
        for (int i = 0; i < others; i++)
            atomic_store(&page->threads[i].tid, 1000 + i);
        atomic_store(&page->order.lease_ms, 60);
        give_order(LIVESHIFT_CLOSED);
        forced_ms = 1;
        on_wait = heartbeat_once;
        gate_pass(&gate, &one, 1, ME);
        CHECK_SAME(waits, 30 + 60);
        CHECK_SAME(atomic_load(&page->answer.reopened), 7);
        CHECK_SAME(rows_in_use(), others);
        for (size_t i = 0; i < sizeof page->counters[0].kind; i++)
            CHECK_SAME(page->counters[0].kind[i], 0); /* these bytes follow the threads' rows */
    }
}

static void sees_one_waiting(unsigned wait) {
    CHECK_SAME(wait, 1);
    CHECK_SAME(atomic_load(&page->threads[0].wants), 1);
    CHECK_SAME(atomic_load(&page->threads[0].clock), 2);
    CHECK_SAME(atomic_load(&page->threads[0].kind), 1);
    CHECK_SAME(gate.waiting[2], 1);
    set_clock(2, 2, 1, 2);
    give_order_of(7, 4, LIVESHIFT_TARGET);
}

static void fast_path(void) {
    reset_page();
    gate_begin(&gate, &clocks[2], 1, ME);
    give_order(LIVESHIFT_TARGET);
    set_clock(2, 1, 1, 1);
    on_wait = sees_one_waiting;
    gate_begin(&gate, &clocks[2], 1, ME);
    CHECK_SAME(waits, 1);
    CHECK_SAME(atomic_load(&clocks[2].announced), 2);
    CHECK_SAME(atomic_load(&clocks[2].raised), 0);
    CHECK_SAME(atomic_load(&page->counters[1].started), 2);
    CHECK_SAME(gate.waiting[2], 0);

    reset_page();
    CHECK(gate_group_begin(&gate));
    CHECK_SAME(atomic_load(&page->answer.groups), 1);
    gate_group_end(&gate);
    CHECK_SAME(atomic_load(&page->answer.groups), 0);
    give_order(LIVESHIFT_ARMED);
    CHECK(!gate_group_begin(&gate));
    CHECK_SAME(atomic_load(&page->answer.groups), 0);
    gate_untracked_begin(&gate);
    CHECK_SAME(atomic_load(&page->answer.untracked), 1);
    gate_untracked_end(&gate);
    CHECK_SAME(atomic_load(&page->answer.untracked), 0);
}

int main(int argc, char **argv) {
    CHECK(argc == 3 && argv[2] != NULL);
    make_page();
    times();
    waiting();
    time_limits();
    parked();
    silence();
    fast_path();
    return 0;
}
