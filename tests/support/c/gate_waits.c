/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a thread waits at the gate: until when, what is seen of it, what wakes it (gate_alone.h).
 * needs: gate/clocks.c gate/process.c
 */
#include "gate_alone.h"

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
    make_page();
    times();
    waiting();
    patience();
    parked();
    silence();
    fast_path();
    return 0;
}
