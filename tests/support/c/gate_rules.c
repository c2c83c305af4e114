/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each rule by which the gate decides, asked for by itself (gate_alone.h).
 * needs: gate/clocks.c gate/process.c
 */
#include "gate_alone.h"

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

int main(int argc, char **argv) {
    CHECK(argc == 3 && argv[2] != NULL);
    make_page();
    orders();
    tables();
    unowned_debts();
    debts();
    several_wants();
    numbers_taken();
    leases();
    verdicts();
    held_shut();
    return 0;
}
