/* SPDX-License-Identifier: Apache-2.0 */
/* An agent's access to a page by pread and pwrite, as in orders.py and host_gate.py. */
#ifndef LIVESHIFT_TESTS_AGENT_H
#define LIVESHIFT_TESTS_AGENT_H

#include "check.h"
#include "gate/page.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

struct agent {
    int fd;
    uint32_t *futex;
    uint32_t attempt, version, heartbeat;
    /* The fields below are what the agent read last. */
    uint32_t rows;
    struct liveshift_clock clocks[LIVESHIFT_PAGE_CLOCKS];
    struct liveshift_answer answer;
    uint64_t targets[LIVESHIFT_PAGE_CLOCKS]; /* by row */
};

static inline void agent_open(struct agent *agent, const char *folder, int pid) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%d", folder, pid);
    memset(agent, 0, sizeof *agent);
    agent->fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(agent->fd >= 0);
    char *header = mmap(NULL, 4096, PROT_READ, MAP_SHARED, agent->fd, 0);
    CHECK(header != MAP_FAILED);
    agent->futex = (uint32_t *)(header + offsetof(struct liveshift_page, order.check));
}

static inline void agent_write(struct agent *agent, size_t at, const void *what, size_t length) {
    CHECK(pwrite(agent->fd, what, length, (off_t)at) == (ssize_t)length);
}

static inline void agent_read(struct agent *agent, size_t at, void *into, size_t length) {
    CHECK(pread(agent->fd, into, length, (off_t)at) == (ssize_t)length);
}

#define AGENT_ORDER(agent, field, value)                                                           \
    agent_write(agent, offsetof(struct liveshift_page, order.field), &(uint32_t){value}, 4)

static inline void agent_order(struct agent *agent, uint32_t want) {
    AGENT_ORDER(agent, attempt, agent->attempt);
    AGENT_ORDER(agent, version, agent->version);
    AGENT_ORDER(agent, want, want);
    AGENT_ORDER(agent, check,
                ~(want * 0x01000193u ^ agent->attempt * 0x9e3779b1u ^ agent->version));
    syscall(SYS_futex, agent->futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static inline void agent_heartbeat(struct agent *agent) {
    AGENT_ORDER(agent, heartbeat, ++agent->heartbeat);
}

static inline void agent_arm(struct agent *agent, uint32_t lease_ms) {
    agent->attempt++;
    agent->version = 0;
    AGENT_ORDER(agent, lease_ms, lease_ms);
    AGENT_ORDER(agent, missing_count, 0);
    agent_heartbeat(agent);
    agent_order(agent, LIVESHIFT_ARMED);
}

static inline void agent_answer(struct agent *agent) {
    agent_read(agent, offsetof(struct liveshift_page, answer), &agent->answer,
               sizeof agent->answer);
}

static inline void agent_clocks(struct agent *agent) {
    agent_read(agent, offsetof(struct liveshift_page, clocks), &agent->rows, sizeof agent->rows);
    CHECK(agent->rows <= LIVESHIFT_PAGE_CLOCKS);
    agent_read(agent, LIVESHIFT_CLOCKS_AT, agent->clocks, agent->rows * sizeof *agent->clocks);
}

/* Sets the targets to the numbers that have begun. Waits until no group is being begun. */
static inline void agent_read_targets(struct agent *agent) {
    double until = seconds() + 20;
    do {
        CHECK(seconds() < until);
        agent_answer(agent);
    } while (agent->answer.groups != 0);
    agent_clocks(agent);
    for (uint32_t row = 0; row < agent->rows; row++)
        agent->targets[row] = agent->clocks[row].announced;
}

static inline void agent_set_targets(struct agent *agent) {
    for (uint32_t row = 0; row < agent->rows; row++)
        if (agent->clocks[row].target != agent->targets[row])
            agent_write(agent,
                        LIVESHIFT_CLOCKS_AT + row * sizeof *agent->clocks +
                            offsetof(struct liveshift_clock, target),
                        &agent->targets[row], 8);
    agent->version++;
    agent_order(agent, LIVESHIFT_TARGET);
}

/* Whether the process has reached its targets. If it is beyond a target, this function raises that
   target and sets `raised`. */
static inline bool agent_reached(struct agent *agent, bool *raised) {
    agent_answer(agent);
    uint32_t changes = agent->answer.changes, known = agent->rows;
    agent_clocks(agent);
    agent_answer(agent);
    bool reached = changes == agent->answer.changes && agent->answer.groups == 0 &&
                   agent->answer.untracked == 0;
    for (uint32_t row = known; row < agent->rows; row++)
        agent->targets[row] = 0;
    for (uint32_t row = 0; row < agent->rows; row++) {
        struct liveshift_clock *clock = &agent->clocks[row];
        uint64_t number = clock->raised > clock->returned ? clock->raised : clock->returned;
        if (clock->id == 0)
            continue;
        if (number > agent->targets[row]) {
            agent->targets[row] = number;
            *raised = true;
        }
        reached =
            reached && clock->returned == agent->targets[row] && clock->raised <= clock->returned;
    }
    return reached && !*raised;
}

#endif
