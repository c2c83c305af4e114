/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads pass the gate as fast as they can, and an agent stops them at random moments. When the
 * agent finds its targets reached and the gate closed, no clock may change any more. In the end no
 * operation was lost or counted twice.
 * needs: gate/gate.c gate/clocks.c gate/process.c
 */
#include "agent.h"
#include "gate/clocks.h"

#include <sched.h>

#define WORKERS 4
#define POOL 2 /* further threads, which share one blocking communicator */
#define CLOCKS 3

static struct gate *gate;
static atomic_bool stop;

struct worker {
    pthread_t thread;
    unsigned seed;
    struct liveshift_clock *clocks[CLOCKS];
    uint64_t done[CLOCKS];
};

static struct worker workers[WORKERS];
static struct liveshift_clock *shared;
static _Atomic uint64_t shared_done;

static void group(struct worker *worker, unsigned n) {
    unsigned picked[4];
    int32_t tid = current_tid();
    bool open = gate_group_begin(gate);
    struct gate_want wants[4] = {0};
    for (unsigned i = 0; i < n; i++) {
        picked[i] = below(&worker->seed, CLOCKS);
        struct liveshift_clock *clock = worker->clocks[picked[i]];
        if (open)
            gate_announce(gate, clock, 1, tid);
        wants[i] = (struct gate_want){
            .clock = (uint32_t)(clock - liveshift_clocks(gate->page)), .kind = 1, .count = 1};
    }
    if (open)
        gate_group_end(gate);
    else
        gate_pass(gate, wants, n, tid);
    for (unsigned i = 0; i < n; i++) {
        gate_end(worker->clocks[picked[i]]);
        worker->done[picked[i]]++;
    }
}

static void *work(void *argument) {
    struct worker *worker = argument;
    while (!atomic_load(&stop)) {
        unsigned draw = below(&worker->seed, 100);
        if (draw < 75) {
            unsigned which = below(&worker->seed, CLOCKS);
            gate_begin(gate, worker->clocks[which], 0, current_tid());
            gate_end(worker->clocks[which]);
            worker->done[which]++;
        } else if (draw < 95) {
            group(worker, 2 + below(&worker->seed, 3));
        } else if (draw < 97) {
            gate_untracked_begin(gate);
            sched_yield();
            gate_untracked_end(gate);
        } else
            sched_yield();
    }
    return NULL;
}

static void *serve(void *argument) {
    (void)argument;
    while (!atomic_load(&stop)) {
        gate_begin(gate, shared, 2, current_tid());
        sched_yield(); /* inside the call */
        gate_end(shared);
        atomic_fetch_add(&shared_done, 1);
    }
    return NULL;
}

static void nothing_moves(struct agent *agent) {
    static uint64_t returned[LIVESHIFT_PAGE_CLOCKS];
    for (uint32_t row = 0; row < agent->rows; row++)
        returned[row] = agent->clocks[row].returned;
    for (int i = 0; i < 20; i++)
        sched_yield();
    bool raised = false;
    agent_clocks(agent);
    for (uint32_t row = 0; row < agent->rows; row++)
        CHECK_SAME(agent->clocks[row].returned, returned[row]);
    while (!agent_reached(agent, &raised)) { /* an untracked communication may have begun */
        CHECK(!raised);
        CHECK(agent->answer.untracked != 0);
    }
}

/* Makes one attempt. Returns whether it reached a boundary. */
static bool attempt(struct agent *agent, unsigned *seed) {
    agent_arm(agent, 0);
    if (below(seed, 10) == 0)
        return false;
    agent_read_targets(agent);
    if (below(seed, 3) == 0) /* pretend that another rank has begun more */
        agent->targets[below(seed, agent->rows)] += 1 + below(seed, 3);
    agent_set_targets(agent);
    if (below(seed, 10) == 0)
        return false;
    double until = seconds() + 60;
    for (;;) {
        bool raised = false;
        CHECK(seconds() < until);
        if (agent_reached(agent, &raised)) {
            agent_order(agent, LIVESHIFT_CLOSED);
            if (agent_reached(agent, &raised))
                break;
            raised = true; /* back to TARGET: a thread was about to raise a target */
        }
        if (raised)
            agent_set_targets(agent);
    }
    nothing_moves(agent);
    return true;
}

/* The agent sends no heartbeat: the threads open the gate themselves. */
static void silence(struct agent *agent) {
    agent_arm(agent, 60);
    double until = seconds() + 60;
    do {
        CHECK(seconds() < until);
        sched_yield();
        agent_answer(agent);
    } while (agent->answer.reopened != agent->attempt);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    setenv("LIVESHIFT_PAGES", argv[2], 1);
    gate = current_gate();
    struct communicator_info made = {
        .library = LIVESHIFT_NCCL, .size = 8, .rank = 1, .device = -1, .made_by = 'I'};
    pthread_t pool[POOL];
    for (unsigned i = 0; i < WORKERS; i++) {
        made.id = 1000 * (i + 1);
        struct liveshift_communicator *row = communicator_add(gate, &made);
        for (int c = 0; c < CLOCKS; c++)
            workers[i].clocks[c] = clock_add(gate, row, c - 1, c == 0 ? -1 : c);
        workers[i].seed = i + 1;
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    made.library = LIVESHIFT_GLOO;
    made.id = 9000;
    shared = clock_add(gate, communicator_add(gate, &made), -1, -1);
    for (int i = 0; i < POOL; i++)
        CHECK(pthread_create(&pool[i], NULL, serve, NULL) == 0);

    static struct agent agent;
    unsigned seed = 7, ended = 0;
    agent_open(&agent, argv[2], getpid());
    for (int round = 0, rounds = 10 * atoi(argv[1]); round < rounds; round++) {
        ended += attempt(&agent, &seed);
        if (below(&seed, 4) != 0)
            agent_order(&agent,
                        LIVESHIFT_OPEN); /* else the next attempt begins with a closed gate */
        if (round % 200 == 199)
            silence(&agent);
    }
    agent_order(&agent, LIVESHIFT_OPEN);
    CHECK(ended > 0);
    atomic_store(&stop, true);
    for (unsigned i = 0; i < WORKERS; i++)
        pthread_join(workers[i].thread, NULL);
    for (int i = 0; i < POOL; i++)
        pthread_join(pool[i], NULL);

    for (unsigned i = 0; i < WORKERS; i++)
        for (unsigned c = 0; c < CLOCKS; c++) {
            CHECK_SAME(atomic_load(&workers[i].clocks[c]->announced), workers[i].done[c]);
            CHECK_SAME(atomic_load(&workers[i].clocks[c]->returned), workers[i].done[c]);
        }
    CHECK_SAME(atomic_load(&shared->announced), atomic_load(&shared_done));
    CHECK_SAME(atomic_load(&shared->returned), atomic_load(&shared_done));
    for (int i = 0; i < LIVESHIFT_PAGE_THREADS; i++)
        CHECK_SAME(atomic_load(&gate->page->threads[i].tid), 0);
    for (unsigned i = 0; i < LIVESHIFT_PAGE_CLOCKS; i++)
        CHECK_SAME(gate->waiting[i], 0);
    return 0;
}
