/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thread that has never passed the gate owns the pending operation, and the gate cannot know that
 * it is the owner. The other threads are a pool. Each of them passes again after its own short
 * stall limit. The test checks that the boundary is reached all the same.
 * needs: gate/gate.c gate/clocks.c gate/process.c
 */
#include "agent.h"
#include "gate/clocks.h"

#include <sched.h>

#define POOL 2
#define PENDING_UP_TO 3 /* a peer has begun that many */
#define AT_MOST_S 20

static struct gate *gate;
static atomic_bool stop;
static struct liveshift_clock *pool_clock, *first, *later;

static void *serve(void *argument) {
    (void)argument;
    while (!atomic_load(&stop)) {
        gate_begin(gate, pool_clock, 2, current_tid());
        gate_end(pool_clock);
        sched_yield();
    }
    return NULL;
}

/* Passes the gate with whole groups. At the first one it has taken no number yet. */
static void *come(void *argument) {
    (void)argument;
    while (!atomic_load(&stop)) {
        struct liveshift_clock *clocks[] = {first, later};
        for (int i = 0; i < 2; i++) {
            struct gate_want want = {.clock = (uint32_t)(clocks[i] - liveshift_clocks(gate->page)),
                                     .kind = 1,
                                     .count = 1};
            gate_pass(gate, &want, 1, current_tid());
            gate_end(clocks[i]);
        }
        sched_yield();
    }
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    setenv("LIVESHIFT_PAGES", argv[2], 1);
    gate = current_gate();
    struct communicator_info made = {
        .library = LIVESHIFT_GLOO, .id = 9000, .size = 8, .rank = 1, .device = -1, .made_by = 'I'};
    pool_clock = clock_add(gate, communicator_add(gate, &made), -1, -1);
    made.library = LIVESHIFT_NCCL;
    made.id = 1000;
    struct liveshift_communicator *row = communicator_add(gate, &made);
    first = clock_add(gate, row, -1, -1);
    later = clock_add(gate, row, 0, 1);
    pthread_t pool[POOL], new_thread;
    for (int i = 0; i < POOL; i++)
        CHECK(pthread_create(&pool[i], NULL, serve, NULL) == 0);
    while (atomic_load(&pool_clock->returned) < 100)
        sched_yield();

    static struct agent agent;
    agent_open(&agent, argv[2], getpid());
    agent_arm(&agent, 0);
    agent_read_targets(&agent);
    uint32_t pending = (uint32_t)(later - liveshift_clocks(gate->page));
    CHECK_SAME(agent.targets[pending], 0);
    agent.targets[pending] = PENDING_UP_TO;
    agent_set_targets(&agent);
    CHECK(pthread_create(&new_thread, NULL, come, NULL) == 0);
    double until = seconds() + AT_MOST_S;
    for (;;) {
        bool raised = false;
        CHECK(seconds() < until);
        if (agent_reached(&agent, &raised)) {
            agent_order(&agent, LIVESHIFT_CLOSED);
            if (agent_reached(&agent, &raised))
                break;
            raised = true; /* back to TARGET: a thread was about to raise a target */
        }
        if (raised)
            agent_set_targets(&agent);
        sched_yield();
    }
    CHECK(atomic_load(&later->returned) >= PENDING_UP_TO);
    CHECK(atomic_load(&pool_clock->returned) > 100);

    atomic_store(&stop, true);
    agent_order(&agent, LIVESHIFT_OPEN);
    for (int i = 0; i < POOL; i++)
        pthread_join(pool[i], NULL);
    pthread_join(new_thread, NULL);
    return 0;
}
