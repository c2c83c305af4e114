/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process with busy threads forks again and again. Each child gets its own page, with all
 * counters at 0 and an open gate, even if the parent's gate was closed. The parent's page does not
 * change.
 * needs: gate/gate.c gate/clocks.c gate/process.c
 */
#include "agent.h"
#include "gate/clocks.h"

#include <sched.h>
#include <sys/wait.h>

#define BUSY 3

static struct liveshift_clock *clocks[BUSY];
static uint64_t done[BUSY];
static atomic_bool stop;

static void *work(void *argument) {
    unsigned long which = (unsigned long)argument;
    while (!atomic_load(&stop)) {
        gate_begin(current_gate(), clocks[which], 0, current_tid());
        gate_end(clocks[which]);
        done[which]++;
        sched_yield();
    }
    return NULL;
}

static struct liveshift_clock *clock_of(uint64_t id) {
    struct communicator_info made = {.library = LIVESHIFT_NCCL, .id = id, .size = 2, .rank = 0};
    struct liveshift_communicator *row = communicator_add(current_gate(), &made);
    CHECK(row != NULL);
    return clock_add(current_gate(), row, -1, -1);
}

static int in_child(int parent, unsigned generation) {
    CHECK_SAME(process_generation(), generation + 1);
    CHECK_SAME(current_tid(), getpid());
    /* A write to one of the parent's rows must not reach the parent's page. */
    gate_end(clocks[0]);
    struct gate *gate = current_gate();
    CHECK(gate->page->pid == getpid() && getpid() != parent);
    CHECK_SAME(atomic_load(&gate->page->order.want), LIVESHIFT_OPEN);
    CHECK_SAME(atomic_load(&gate->page->clocks), 0);
    struct liveshift_clock *clock = clock_of(5);
    for (int i = 0; i < 3; i++) {
        gate_begin(gate, clock, 0, current_tid());
        gate_end(clock);
    }
    CHECK_SAME(atomic_load(&clock->returned), 3);
    CHECK_SAME(atomic_load(&gate->page->counters[0].started), 3);
    return 0;
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    setenv("LIVESHIFT_PAGES", argv[2], 1);
    static struct agent agent;
    struct gate *gate = current_gate();
    agent_open(&agent, argv[2], getpid());
    pthread_t busy[BUSY];
    for (unsigned long i = 0; i < BUSY; i++) {
        clocks[i] = clock_of(100 + i);
        CHECK(pthread_create(&busy[i], NULL, work, (void *)i) == 0);
    }
    for (int round = 0, rounds = atoi(argv[1]) / 2; round < rounds; round++) {
        if (round % 2 == 1)
            agent_arm(&agent, 0);
        int parent = getpid();
        unsigned generation = process_generation();
        pid_t child = fork();
        if (child == 0)
            _exit(in_child(parent, generation));
        CHECK(child > 0);
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        CHECK(current_gate() == gate && process_generation() == generation);
        static struct agent theirs; /* the page's file stays after the child */
        agent_open(&theirs, argv[2], child);
        agent_clocks(&theirs);
        CHECK_SAME(theirs.rows, 1);
        CHECK_SAME(theirs.clocks[0].returned, 3);
        close(theirs.fd);
        munmap((char *)theirs.futex - offsetof(struct liveshift_page, order.check), 4096);
        agent_order(&agent, LIVESHIFT_OPEN);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < BUSY; i++) {
        pthread_join(busy[i], NULL);
        CHECK_SAME(atomic_load(&clocks[i]->returned), done[i]);
    }
    CHECK_SAME(gate->page->pid, getpid());
    return 0;
}
