/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests each rule by which the gate decides, one at a time (gate_fixture.h).
 * needs: gate/clocks.c gate/process.c
 */
#include "gate_fixture.h"

static void orders(void) {
    reset_page();
    give_order_of(21, 22, LIVESHIFT_TARGET);
    struct order o = gate_order(page);
    CHECK_SAME(o.want, LIVESHIFT_TARGET);
    CHECK_SAME(o.attempt, 21);
    CHECK_SAME(o.version, 22);
    /* An order that is just being written counts as armed, even if `want` is open. */
    atomic_store(&page->order.want, LIVESHIFT_OPEN);
    CHECK_SAME(gate_order(page).want, LIVESHIFT_ARMED);
}

static void tables(void) {
    reset_page();
    CHECK_SAME(row_of(&gate, 100), 0);
    CHECK_SAME(row_of(&gate, 100 + ROWS - 1), ROWS - 1);
    CHECK_SAME(row_of(&gate, 1), UINT32_MAX);
    CHECK_SAME(clocks_used(page), ROWS);
    atomic_store(&page->clocks, LIVESHIFT_PAGE_CLOCKS + 1);
    CHECK_SAME(clocks_used(page), LIVESHIFT_PAGE_CLOCKS);

    set_clock(1, 5, 0, 0);
    gate.waiting[1] = 2;
    CHECK_SAME(passed(&gate, 1), 3);
    gate.waiting[1] = 6; /* a waiting number was counted before it was announced */
    CHECK_SAME(passed(&gate, 1), 0);
}

static void pending_without_owner_rules(void) {
    reset_page();
    CHECK_SAME(pending_without_owner(&gate, 2, ME), PENDING_OWN); /* no thread came here yet */
    set_owner(5, OTHER);
    CHECK_SAME(pending_without_owner(&gate, 2, ME), PENDING_OTHERS);
    set_owner(2, ME);
    CHECK_SAME(pending_without_owner(&gate, 2, ME),
               PENDING_OWN); /* it has used this communicator */
    set_owner(2, OTHER);
    set_owner(3, ME);
    CHECK_SAME(pending_without_owner(&gate, 2, ME), PENDING_OTHERS); /* it has used another one */
    set_owner(2, 0);
    CHECK_SAME(pending_without_owner(&gate, 2, ME),
               PENDING_OTHERS); /* it is one of two threads, but not known which */

    reset_page();
    set_owner(0, OTHER);
    CHECK_SAME(pending_without_owner(&gate, 0, ME), PENDING_OTHERS);
    atomic_store(&clocks[0].id, 0); /* a freed row */
    CHECK_SAME(pending_without_owner(&gate, 0, ME), PENDING_OWN);
    set_owner(ROWS - 1, OTHER);
    CHECK_SAME(pending_without_owner(&gate, ROWS - 1, ME), PENDING_OTHERS);
}

static void pending_rules(void) {
    reset_page();
    CHECK_SAME(pending_for(&gate, ME), PENDING_NONE);
    for (uint32_t row = 0; row < ROWS; row += ROWS - 1) {
        set_clock(row, 4, 4, 4);
        CHECK_SAME(pending_for(&gate, ME), PENDING_NONE);
        set_clock(row, 4, 4, 5);
        CHECK_SAME(pending_for(&gate, ME), PENDING_OWN); /* there is no other thread */
        set_owner(row, OTHER);
        CHECK_SAME(pending_for(&gate, ME), PENDING_OTHERS);
        CHECK_SAME(pending_for(&gate, OTHER), PENDING_OWN);
        set_clock(1, 0, 0, 1);
        set_owner(1, ME);
        CHECK_SAME(pending_for(&gate, ME), PENDING_OWN); /* besides that of the other thread */
        set_clock(1, 1, 0, 1);
        CHECK_SAME(pending_for(&gate, ME), PENDING_OTHERS);
        set_owner(row, 0);
        set_owner(1, OTHER); /* the only thread there is */
        CHECK_SAME(pending_for(&gate, ME), PENDING_OTHERS);
        CHECK_SAME(pending_for(&gate, OTHER), PENDING_OWN);
        set_owner(1, 0);
        atomic_store(&clocks[row].id, 0);
        CHECK_SAME(pending_for(&gate, ME),
                   PENDING_NONE); /* on a row that was freed nothing is pending */
        atomic_store(&clocks[row].id, 1);
        CHECK_SAME(pending_for(&gate, ME), PENDING_OWN);
        set_clock(row, 0, 0, 0);
        set_clock(1, 0, 0, 0);
    }

    /* The clocks do not exist yet. */
    reset_page();
    atomic_store(&page->missing_clocks[0].id, 1);
    CHECK_SAME(pending_for(&gate, ME), PENDING_NONE); /* the row is of an earlier order */
    atomic_store(&page->order.missing_count, 1);
    CHECK_SAME(pending_for(&gate, ME), PENDING_OWN);
    set_owner(0, OTHER);
    CHECK_SAME(pending_for(&gate, ME), PENDING_OTHERS);
    CHECK_SAME(pending_for(&gate, OTHER), PENDING_OWN);
    atomic_store(&page->missing_clocks[0].id, 100 + 9); /* that clock was made meanwhile */
    CHECK_SAME(pending_for(&gate, ME), PENDING_NONE);
    CHECK_SAME(pending_for(&gate, OTHER), PENDING_NONE);
    atomic_store(&page->missing_clocks[1].id, 1);
    CHECK_SAME(pending_for(&gate, ME), PENDING_NONE);
    atomic_store(&page->order.missing_count, 2);
    CHECK_SAME(pending_for(&gate, ME), PENDING_OTHERS);
    atomic_store(&page->missing_clocks[1].communicator, 1);
    set_owner(1, ME);
    CHECK_SAME(pending_for(&gate, ME), PENDING_OWN);
    /* The count exceeds the table, and the memory behind the table looks like a row. */
    for (int i = 0; i < LIVESHIFT_PAGE_MISSING_CLOCKS; i++)
        atomic_store(&page->missing_clocks[i].id, 100);
    size_t behind = offsetof(struct liveshift_page, missing_clocks) + sizeof page->missing_clocks;
    CHECK(behind + sizeof *page->missing_clocks <= LIVESHIFT_HEADER_SIZE);
    memset((char *)page + behind, 1, sizeof *page->missing_clocks);
    atomic_store(&page->order.missing_count, 1000);
    CHECK_SAME(pending_for(&gate, ME), PENDING_NONE);
}

/* The array has one want more than the count says: the one of row 9. It must be ignored. */
static void several_wants(void) {
    reset_page();
    struct gate_want wants[3] = {{.clock = 1, .count = 1}, {.clock = 2, .count = 1}, {.clock = 9}};
    wants[2].count = 1;
    set_clock(1, 0, 0, 1);
    set_clock(2, 0, 0, 1);
    CHECK(within_targets(&gate, wants, 2));
    set_clock(1, 0, 0, 0);
    CHECK(!within_targets(&gate, wants, 2));
    set_clock(1, 0, 0, 1);
    set_clock(2, 0, 0, 0);
    CHECK(!within_targets(&gate, wants, 2));
    CHECK(within_targets(&gate, wants, 1));
    set_clock(2, 0, 0, 1);
    wants[1].clock = 1; /* the same clock twice */
    CHECK(!within_targets(&gate, wants, 2));
    set_clock(1, 0, 0, 2);
    CHECK(within_targets(&gate, wants, 2));
    set_clock(1, 1, 1, 2);
    CHECK(!within_targets(&gate, wants, 2));
    wants[1].clock = 2;

    reset_page();
    clocks[1].blocking = clocks[2].blocking = clocks[9].blocking = 1;
    set_clock(9, 1, 0, 0);
    CHECK(!in_flight(&gate, wants, 2));
    set_clock(1, 5, 5, 0);
    CHECK(!in_flight(&gate, wants, 2));
    set_clock(1, 5, 4, 0);
    CHECK(in_flight(&gate, wants, 2));
    clocks[1].blocking = 0;
    CHECK(!in_flight(&gate, wants, 2));
    set_clock(2, 5, 4, 0);
    CHECK(in_flight(&gate, wants, 2));

    clocks[9].blocking = 0;
    for (int row = 1; row <= 2; row++) {
        clocks[row].blocking = 1;
        clocks[row].from = -1;
    }
    CHECK_SAME(stall_limit_ms(&gate, wants, 2, PENDING_NONE), GATE_STALL_LIMIT_WORKERS_MS);
    for (int row = 1; row <= 2; row++) {
        clocks[row].from = 0;
        CHECK_SAME(stall_limit_ms(&gate, wants, 2, PENDING_NONE), GATE_STALL_LIMIT_MS);
        CHECK_SAME(stall_limit_ms(&gate, wants, 2, PENDING_OTHERS), GATE_STALL_LIMIT_WORKERS_MS);
        clocks[row].from = -1;
        clocks[row].blocking = 0;
        CHECK_SAME(stall_limit_ms(&gate, wants, 2, PENDING_OTHERS), GATE_STALL_LIMIT_MS);
        clocks[row].blocking = 1;
    }
}

static void numbers_taken(void) {
    reset_page();
    struct gate_want wants[3] = {{.clock = 1, .kind = 1, .count = 1, .announced = true},
                                 {.clock = 2, .kind = 2, .count = 3},
                                 {.clock = 9, .kind = 2, .count = 1}};
    struct gate_want *beyond = &wants[2];
    set_clock(1, 1, 0, 1);
    set_clock(2, 0, 0, 3);
    for (int times = 0; times < 2; times++) {
        count_waiting(&gate, wants, 2);
        CHECK_SAME(gate.waiting[1], 1); /* counted once, although it tries again */
        CHECK_SAME(gate.waiting[2], 0); /* it is not announced yet */
        CHECK(wants[0].counted && !wants[1].counted);
    }
    give_order(LIVESHIFT_TARGET);
    struct order seen = gate_order(page);
    CHECK(take(&gate, wants, 2, ME, &seen, false));
    CHECK_SAME(gate.waiting[1], 0);
    CHECK(!wants[0].counted && !wants[1].counted);
    for (int row = 1; row <= 2; row++) {
        CHECK_SAME(atomic_load(&clocks[row].announced), row == 1 ? 1 : 3);
        CHECK_SAME(atomic_load(&clocks[row].owner), ME);
        CHECK_SAME(atomic_load(&clocks[row].kind), row);
        CHECK_SAME(atomic_load(&clocks[row].raised), 0);
    }
    CHECK_SAME(atomic_load(&page->counters[1].started), 0); /* counted when it was announced */
    CHECK_SAME(atomic_load(&page->counters[2].started), 3);
    CHECK_SAME(atomic_load(&page->answer.changes), 0); /* the targets allow it */
    CHECK_SAME(gate.progress, 1);

    /* Beyond the targets: the thread raises them, and counts one change for the agent. */
    atomic_store(&clocks[1].announced, 2);
    count_waiting(&gate, wants, 2);
    CHECK(take(&gate, wants, 2, ME, &seen, false));
    CHECK_SAME(atomic_load(&clocks[1].raised), 2);
    CHECK_SAME(atomic_load(&clocks[2].raised), 6);
    CHECK_SAME(atomic_load(&page->answer.changes), 1);
    CHECK_SAME(gate.progress, 2);
    atomic_store(&clocks[2].announced, 3);
    CHECK(take(&gate, &wants[1], 1, ME, &seen, false));
    CHECK_SAME(atomic_load(&page->answer.changes), 1); /* the clock was raised that far before */

    /* Under another order nothing changes except the raised target. */
    struct order old = {.want = LIVESHIFT_TARGET, .attempt = 6, .version = 3};
    atomic_store(&clocks[1].announced, 3);
    count_waiting(&gate, wants, 2);
    set_owner(1, OTHER);
    set_owner(2, OTHER);
    CHECK(!take(&gate, wants, 2, ME, &old, false));
    CHECK_SAME(gate.waiting[1], 1);
    CHECK(wants[0].counted);
    CHECK_SAME(atomic_load(&clocks[1].announced), 3);
    CHECK_SAME(atomic_load(&clocks[2].announced), 6);
    CHECK_SAME(atomic_load(&clocks[1].raised), 3);
    CHECK_SAME(atomic_load(&clocks[1].owner), OTHER);
    CHECK_SAME(atomic_load(&clocks[2].owner), OTHER);
    CHECK_SAME(gate.progress, 3);

    /* With the gate open nothing is raised, and no thread waits for progress. */
    uint32_t changes = atomic_load(&page->answer.changes);
    give_order(LIVESHIFT_OPEN);
    seen = gate_order(page);
    CHECK(take(&gate, wants, 2, ME, &seen, true));
    CHECK_SAME(atomic_load(&clocks[1].raised), 3);
    CHECK_SAME(atomic_load(&clocks[2].announced), 9);
    CHECK_SAME(atomic_load(&page->answer.changes), changes);
    CHECK_SAME(gate.progress, 3);
    CHECK_SAME(atomic_load(&clocks[beyond->clock].announced), 0);
    CHECK_SAME(gate.waiting[beyond->clock], 0);
    CHECK_SAME(atomic_load(&clocks[beyond->clock].owner), 0);
    CHECK_SAME(atomic_load(&clocks[beyond->clock].raised), 0);

    /* Nor does a refused attempt touch the want behind the counted ones. */
    give_order(LIVESHIFT_TARGET);
    beyond->announced = true;
    count_waiting(&gate, wants, 2);
    CHECK(!beyond->counted);
    CHECK(!take(&gate, wants, 2, ME, &old, false));
    CHECK_SAME(gate.waiting[beyond->clock], 0);
}

static void leases(void) {
    reset_page();
    struct gate_waiter waiter = {.heartbeat = 5};
    atomic_store(&page->order.heartbeat, 5);
    give_order(LIVESHIFT_CLOSED);
    struct order o = gate_order(page);
    waiter.silent_ms = 9;
    CHECK(!lease_is_over(&gate, &o, &waiter)); /* there is no lease */
    atomic_store(&page->order.lease_ms, 10);
    CHECK(!lease_is_over(&gate, &o, &waiter));
    waiter.silent_ms = 10;
    CHECK(lease_is_over(&gate, &o, &waiter));
    o.want = LIVESHIFT_TEARDOWN; /* from there on a silent agent opens nothing */
    CHECK(!lease_is_over(&gate, &o, &waiter));
    o.want = LIVESHIFT_CLOSED;
    atomic_store(&page->answer.down, 1);
    CHECK(!lease_is_over(&gate, &o, &waiter));
    atomic_store(&page->answer.down, 0);
    atomic_store(&page->order.lease_ms, 1);
    waiter.silent_ms = 1;
    CHECK(lease_is_over(&gate, &o, &waiter));
    atomic_store(&page->order.heartbeat, 6); /* a heartbeat */
    CHECK(!lease_is_over(&gate, &o, &waiter));
    CHECK_SAME(waiter.silent_ms, 0);
    CHECK_SAME(waiter.heartbeat, 6);
    waiter.silent_ms = 1;
    CHECK(lease_is_over(&gate, &o, &waiter));
}

static struct gate_want want;

static enum gate_verdict try_with(struct gate_waiter waiter) {
    want = (struct gate_want){.clock = 1, .kind = 1, .count = 1};
    check_locked = true;
    enum gate_verdict verdict = gate_try(&gate, &want, 1, ME, &waiter);
    check_locked = false;
    check_unlocked();
    return verdict;
}

static void verdicts(void) {
    const struct gate_waiter fresh = {0};
    reset_page();
    CHECK_SAME(try_with(fresh), GATE_GO);
    CHECK_SAME(gate.progress, 0);
    for (uint32_t order = LIVESHIFT_ARMED; order <= LIVESHIFT_DEVICES; order++) {
        give_order(order);
        if (order != LIVESHIFT_TARGET)
            CHECK_SAME(try_with(fresh), order == LIVESHIFT_ARMED ? GATE_ARMED : GATE_CLOSED);
    }
    atomic_store(&page->answer.reopened, 6); /* of another attempt */
    CHECK_SAME(try_with(fresh), GATE_CLOSED);
    atomic_store(&page->answer.reopened, 7);
    CHECK_SAME(try_with(fresh), GATE_GO);
    CHECK_SAME(gate.progress, 0);
    atomic_store(&page->answer.reopened, 0);
    CHECK_SAME(atomic_load(&clocks[1].announced), 2);

    reset_page();
    atomic_store(&page->order.lease_ms, 10);
    CHECK_SAME(try_with((struct gate_waiter){.silent_ms = 10}), GATE_GO);
    CHECK_SAME(atomic_load(&page->answer.reopened), 0); /* it is open */
    give_order(LIVESHIFT_CLOSED);
    CHECK_SAME(try_with((struct gate_waiter){.silent_ms = 9}), GATE_CLOSED);
    CHECK_SAME(atomic_load(&page->answer.reopened), 0);
    CHECK_SAME(try_with((struct gate_waiter){.silent_ms = 10}), GATE_GO);
    CHECK_SAME(atomic_load(&page->answer.reopened), 7);

    reset_page();
    give_order(LIVESHIFT_TARGET);
    set_clock(1, 0, 0, 1);
    CHECK_SAME(try_with(fresh), GATE_GO);
    CHECK_SAME(atomic_load(&clocks[1].raised), 0);
    CHECK_SAME(try_with(fresh), GATE_PARK); /* beyond its target, and nothing is pending */
    const struct gate_waiter stalled = {.progress = 1, .stalled_ms = GATE_STALL_LIMIT_MS};
    CHECK_SAME(gate.progress, 1);
    CHECK_SAME(try_with(stalled),
               GATE_PARK); /* an operation that only enqueues waits for no peers */
    clocks[1].blocking = 1;
    clocks[1].from = 0;
    CHECK_SAME(try_with((struct gate_waiter){.progress = 1, .stalled_ms = GATE_STALL_LIMIT_MS - 1}),
               GATE_PARK);
    CHECK_SAME(try_with(stalled), GATE_GO); /* the operation before it is in flight */
    CHECK_SAME(atomic_load(&clocks[1].raised), 2);
    atomic_store(&clocks[1].returned, 2);
    CHECK_SAME(gate.progress, 2);
    CHECK_SAME(try_with((struct gate_waiter){.progress = 2, .stalled_ms = GATE_STALL_LIMIT_MS}),
               GATE_PARK);

    reset_page();
    give_order(LIVESHIFT_TARGET);
    set_clock(2, 0, 0, 1);
    set_owner(2, ME);
    CHECK_SAME(try_with(fresh), GATE_GO); /* its own pending operation comes later in its program */
    CHECK_SAME(atomic_load(&clocks[1].raised), 1);
    set_owner(2, OTHER);
    CHECK_SAME(try_with(fresh), GATE_PENDING);
    CHECK_SAME(try_with((struct gate_waiter){.progress = 1, .stalled_ms = GATE_STALL_LIMIT_MS - 1}),
               GATE_PENDING);
    CHECK_SAME(try_with((struct gate_waiter){.pending_ms = GATE_PENDING_LIMIT_MS - 1}),
               GATE_PENDING);
    CHECK_SAME(gate.progress, 1);
    struct gate_waiter behind = stalled;
    behind.progress = 0; /* a thread took a number since */
    want = (struct gate_want){.clock = 1, .kind = 1, .count = 1};
    CHECK_SAME(gate_try(&gate, &want, 1, ME, &behind), GATE_PENDING);
    CHECK_SAME(behind.stalled_ms, 0);
    CHECK_SAME(behind.progress, 1);
    CHECK_SAME(try_with(stalled), GATE_GO);
    CHECK_SAME(atomic_load(&clocks[1].raised), 2);
    CHECK_SAME(try_with((struct gate_waiter){.pending_ms = GATE_PENDING_LIMIT_MS}), GATE_GO);
    CHECK_SAME(atomic_load(&clocks[1].raised), 3);

    /* An announced number counts as waiting until its thread has passed. */
    reset_page();
    give_order(LIVESHIFT_CLOSED);
    struct gate_waiter waiter = fresh;
    want = (struct gate_want){.clock = 1, .kind = 1, .count = 1, .announced = true};
    atomic_store(&clocks[1].announced, 1);
    CHECK_SAME(gate_try(&gate, &want, 1, ME, &waiter), GATE_CLOSED);
    CHECK_SAME(gate.waiting[1], 1);
    give_order(LIVESHIFT_OPEN);
    CHECK_SAME(gate_try(&gate, &want, 1, ME, &waiter), GATE_GO);
    CHECK_SAME(gate.waiting[1], 0);
}

/* A thread that opens the gate decides under the same lock, so one of the two sees the other. */
static void held_shut(void) {
    reset_page();
    atomic_store(&page->answer.reopened, 6);
    check_locked = true;
    CHECK(gate_keep_closed(&gate, 7));
    check_locked = false;
    check_unlocked();
    CHECK_SAME(atomic_load(&page->answer.down), 1);
    atomic_store(&page->answer.down, 0);
    CHECK(!gate_keep_closed(&gate, 6));
    CHECK_SAME(atomic_load(&page->answer.down), 0);
    check_unlocked();
}

int main(int argc, char **argv) {
    CHECK(argc == 3 && argv[2] != NULL);
    make_page();
    orders();
    tables();
    pending_without_owner_rules();
    pending_rules();
    several_wants();
    numbers_taken();
    leases();
    verdicts();
    held_shut();
    return 0;
}
