/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads make communicators and clocks, use them and end them, while an agent arms and opens the
 * gate. A reader sees only complete rows, no row changes its clock while the gate is closed, and no
 * operation is missing in the sum.
 * needs: gate/gate.c gate/clocks.c gate/process.c
 */
#include "agent.h"
#include "gate/clocks.h"

#include <sched.h>

#define MAKERS 4

static struct gate *gate;
static _Atomic uint64_t done;
static atomic_int working = MAKERS;
static unsigned long lives;

static void *make(void *argument) {
    unsigned long which = (unsigned long)argument;
    unsigned seed = (unsigned)which;
    for (unsigned long life = 0; life < lives; life++) {
        uint64_t ids[2] = {which, life};
        struct communicator_info made = {.library = LIVESHIFT_NCCL,
                                         .id = hash64(0, ids, sizeof ids),
                                         .size = 4,
                                         .rank = 0,
                                         .device = 0,
                                         .made_by = 'I',
                                         .name = "lives"};
        gate_untracked_begin(gate);
        struct liveshift_communicator *row = communicator_add(gate, &made);
        CHECK(row != NULL);
        struct liveshift_clock *clocks[3];
        for (int c = 0; c < 3; c++) {
            clocks[c] = clock_add(gate, row, c - 1, c == 0 ? -1 : c);
            CHECK(clocks[c] != NULL);
            CHECK_SAME(atomic_load(&clocks[c]->id), clock_id(made.id, c - 1, c == 0 ? -1 : c));
            CHECK_SAME(atomic_load(&clocks[c]->announced), 0);
        }
        gate_untracked_end(gate);
        for (unsigned n = below(&seed, 4); n > 0; n--) {
            struct liveshift_clock *clock = clocks[below(&seed, 3)];
            gate_begin(gate, clock, 0, current_tid());
            gate_end(clock);
            atomic_fetch_add(&done, 1);
        }
        communicator_end(gate, row);
    }
    atomic_fetch_sub(&working, 1);
    return NULL;
}

static void rows_stay(struct agent *agent) {
    static uint64_t ids[LIVESHIFT_PAGE_CLOCKS];
    agent_arm(agent, 0);
    agent_clocks(agent);
    uint32_t rows = agent->rows;
    for (uint32_t row = 0; row < rows; row++)
        ids[row] = agent->clocks[row].id;
    for (int i = 0; i < 5; i++)
        sched_yield();
    agent_clocks(agent);
    CHECK(agent->rows >= rows);
    for (uint32_t row = 0; row < rows;
         row++) /* a free row may get a clock that a thread was just making */
        if (ids[row] != 0 && agent->clocks[row].id != 0)
            CHECK_SAME(agent->clocks[row].id, ids[row]);
    agent_order(agent, LIVESHIFT_OPEN);
    for (int i = 0; i < 5; i++)
        sched_yield();
}

static void a_missing_clock_begins_with_its_target(struct agent *agent) {
    struct communicator_info made = {.library = LIVESHIFT_NCCL, .id = 77, .size = 4, .rank = 0};
    struct liveshift_communicator *row = communicator_add(gate, &made);
    struct liveshift_missing_clock missing = {.id = clock_id(77, 0, 3), .target = 9};
    agent_arm(agent, 0);
    agent_write(agent, offsetof(struct liveshift_page, missing_clocks), &missing, sizeof missing);
    AGENT_ORDER(agent, missing_count, 1);
    CHECK_SAME(atomic_load(&clock_add(gate, row, 0, 3)->target), 9);
    CHECK_SAME(atomic_load(&clock_add(gate, row, 3, 0)->target), 0);
    agent_order(agent, LIVESHIFT_OPEN);
    CHECK_SAME(atomic_load(&clock_add(gate, row, 0, 2)->target), 0);
    communicator_end(gate, row);
}

/* The return of a call must not be counted on the clock of another communicator. */
static void a_call_outlives_its_communicator(void) {
    struct communicator_info made = {.library = LIVESHIFT_NCCL, .id = 78, .size = 2, .rank = 0};
    struct liveshift_communicator *row = communicator_add(gate, &made);
    struct liveshift_clock *clock = clock_add(gate, row, -1, -1);
    gate_begin(gate, clock, 0, current_tid());
    communicator_end(gate, row);
    made.id = 79;
    row = communicator_add(gate, &made);
    struct liveshift_clock *next = clock_add(gate, row, -1, -1);
    CHECK(next != clock);
    gate_end(clock);
    CHECK_SAME(atomic_load(&next->returned), 0);
    CHECK(clock_add(gate, row, 0, 1) == clock);
    communicator_end(gate, row);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    setenv("LIVESHIFT_PAGES", argv[2], 1);
    gate = current_gate();
    lives = 20 * strtoul(argv[1], NULL, 10);
    static struct agent agent;
    agent_open(&agent, argv[2], getpid());
    a_missing_clock_begins_with_its_target(&agent);
    a_call_outlives_its_communicator();
    pthread_t makers[MAKERS];
    for (unsigned long i = 0; i < MAKERS; i++)
        CHECK(pthread_create(&makers[i], NULL, make, (void *)(i + 1)) == 0);
    while (atomic_load(&working) > 0)
        rows_stay(&agent);
    for (int i = 0; i < MAKERS; i++)
        pthread_join(makers[i], NULL);
    agent_clocks(&agent);
    for (uint32_t row = 0; row < agent.rows; row++)
        CHECK_SAME(agent.clocks[row].id, 0);
    CHECK_SAME(atomic_load(&gate->page->retired), atomic_load(&done));
    CHECK(atomic_load(&gate->page->communicators) <= LIVESHIFT_PAGE_COMMUNICATORS);
    return 0;
}
