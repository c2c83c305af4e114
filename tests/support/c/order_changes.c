/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent gives another order while a thread is taking its number: after the thread has read the
 * order, and before it reads it again. The agent may have read the clocks by then and may have
 * found this process at its targets. So the thread must take nothing and leave no trace of the
 * attempt.
 * needs: gate/clocks.c gate/process.c
 */
#include "agent.h"
#include "gate/clocks.h"

#include <stdatomic.h>

static void (*between)(void);

/* take() announces a number between its two reads of the order. Here the agent can act then. */
static inline uint64_t fetch_add_and_pause(_Atomic uint64_t *at, uint64_t count) {
    uint64_t before = atomic_fetch_add(at, count);
    if (between != NULL)
        between();
    return before;
}

#undef atomic_fetch_add
#define atomic_fetch_add(at, count)                                                                \
    _Generic((at),                                                                                 \
        _Atomic uint64_t *: fetch_add_and_pause((_Atomic uint64_t *)(at), count),                  \
        default: fetch_add_only(at, count))
#define fetch_add_only(at, count) atomic_fetch_add_explicit(at, count, memory_order_seq_cst)

#include "gate/gate.c"

#define TARGET 9 /* more numbers than are taken */

static struct gate *gate;
static struct agent agent;
static struct liveshift_clock *waited_for;

static void close_it(void) { agent_order(&agent, LIVESHIFT_CLOSED); }

static void aim_again(void) {
    agent.version++;
    agent_order(&agent, LIVESHIFT_TARGET);
}

static void arm_again(void) { agent_arm(&agent, 0); }

/* Another attempt that is equally far: the two differ only in the number of the attempt. */
static void begin_anew(void) {
    agent.attempt++;
    agent_order(&agent, LIVESHIFT_TARGET);
}

static void open_it(void) { agent_order(&agent, LIVESHIFT_OPEN); }

static void nothing(void) {}

static enum gate_verdict try_while(void (*happens)(void)) {
    struct gate_want want = {
        .clock = (uint32_t)(waited_for - liveshift_clocks(gate->page)), .kind = 1, .count = 1};
    struct gate_waiter waiter = {0};
    between = happens;
    enum gate_verdict verdict = gate_try(gate, &want, 1, current_tid(), &waiter);
    between = NULL;
    return verdict;
}

static uint64_t counted(void) { return atomic_load(&gate->page->counters[1].started); }

static void aim(void) {
    agent_arm(&agent, 0);
    agent_read_targets(&agent);
    agent.targets[waited_for - liveshift_clocks(gate->page)] = TARGET;
    agent_set_targets(&agent);
}

/* Checks that the thread takes nothing, whichever order it read before and after. */
static void check_refused(void (*happens)(void)) {
    uint64_t begun = atomic_load(&waited_for->announced), started = counted(),
             progress = gate->progress;
    CHECK_SAME(try_while(happens), GATE_ARMED);
    CHECK_SAME(atomic_load(&waited_for->announced), begun);
    CHECK_SAME(counted(), started);
    CHECK_SAME(gate->progress, progress);
}

static void check_taken(void (*happens)(void)) {
    uint64_t begun = atomic_load(&waited_for->announced), started = counted();
    CHECK_SAME(try_while(happens), GATE_GO);
    CHECK_SAME(atomic_load(&waited_for->announced), begun + 1);
    CHECK_SAME(counted(), started + 1);
    gate_end(waited_for);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    setenv("LIVESHIFT_PAGES", argv[2], 1);
    gate = current_gate();
    struct communicator_info made = {
        .library = LIVESHIFT_GLOO, .id = 1, .size = 2, .rank = 0, .device = -1, .made_by = 'I'};
    waited_for = clock_add(gate, communicator_add(gate, &made), -1, -1);
    agent_open(&agent, argv[2], getpid());

    check_taken(nothing); /* the gate is open */
    check_refused(close_it);
    open_it();
    check_refused(arm_again);
    open_it();
    void (*orders[])(void) = {close_it, aim_again, arm_again, begin_anew};
    for (unsigned i = 0; i < sizeof orders / sizeof *orders; i++) {
        aim();
        check_refused(orders[i]);
        aim();
        check_taken(nothing); /* within its target, and the order has not changed */
    }
    aim();
    check_taken(open_it); /* a gate that was closed and is open again lets all threads pass */
    return 0;
}
