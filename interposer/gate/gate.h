/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate: every operation that needs its peers passes here, on the application's threads.
 *
 * Open, it costs two counters and one load. Closed, it brings this process to the boundary that
 * the orchestrator is looking for: the least cut at which every operation that was begun anywhere
 * has been begun everywhere (facts: the star form of MANA's collective clock, arXiv 2212.05701).
 *
 * An operation is *announced* by taking the clock's next number, before the gate is looked at; the
 * agent closes the gate before it looks at the clocks. One of the two sees the other, so what was
 * announced when the agent looked is exactly what had begun.
 *
 * LIVESHIFT_TARGET: numbers up to the target pass. A thread that wants a number beyond it
 * - parks, if this process owes nothing: no clock is short of its target;
 * - passes, raising the target, if what is owed is its own thread's to do: the owed operation comes
 *   later in its program, so this one is in every cut that holds the owed one;
 * - gives the thread that owes GATE_PATIENCE_MS to do it, and passes then: perhaps that thread is
 *   waiting for this one. While numbers are given out the time begins anew, for GATE_OWED_MS at most.
 * Which thread owes: whoever took the clock's last number (the owner rule: without it, threads
 * raise targets for each other's debts without end). Where nobody has taken one yet, or the clock
 * has still to be made (struct liveshift_ask): a thread that has used its communicator.
 */
#ifndef LIVESHIFT_INTERPOSER_GATE_H
#define LIVESHIFT_INTERPOSER_GATE_H

#include "hooks/kinds.h"
#include "page.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define GATE_PATIENCE_MS 50

/* Others that pass need not be on their way to what is owed: threads that go on by themselves, each
   time after their own patience, would hold up for ever the one that owes without being known to.
   Each look counts a millisecond at least: of many new orders it is the number that ends the wait. */
#define GATE_OWED_MS 500

/* gloo's collectives are done by its worker threads, those of each communicator by its own, while
   the program's thread waits for one after the other. So the thread that owes is hardly ever the
   one that is at the gate, though the program's often is the same; and two that follow each other
   may be taken up by two workers in another order than elsewhere. Not worth waiting long. */
#define GATE_PATIENCE_WORKERS_MS 5

/* One process's gate: what it knows besides its page. */
struct gate {
    struct liveshift_page *page;
    pthread_mutex_t deciding; /* taken by threads that found the gate closed; never across a call */
    uint64_t progress;        /* numbers given out while closed */
    /* What a thread that waits at the closed gate may do meanwhile, told the kind it wants; NULL:
       nothing. It must not pass the gate. */
    void (*_Atomic errand)(uint32_t kind);
    uint32_t waiting[LIVESHIFT_PAGE_CLOCKS]; /* announced numbers whose threads wait here */
};

/* Numbers wanted of one clock. */
struct gate_want {
    uint32_t clock; /* row */
    uint32_t kind;  /* enum kind */
    uint64_t count;
    bool announced; /* taken already, by the fast path */
    bool entered;   /* counted in `waiting`; the gate's own */
};

enum gate_verdict {
    GATE_GO,    /* the numbers are taken */
    GATE_ARMED, /* targets are awaited */
    GATE_PARK,  /* nothing is owed here: until a target grows or the gate opens */
    GATE_OWED,  /* another thread has something to do first */
    GATE_SHUT   /* nothing passes */
};

/* How long a thread has been at the gate; zero it before the first gate_try. Times are added by
   whoever waits, in milliseconds that this process was awake: a frozen process does not age. */
struct gate_visit {
    uint64_t progress; /* the gate's when it last changed */
    uint32_t stalled_ms;
    uint32_t beat;
    uint32_t silent_ms;
    uint32_t owed_ms; /* with GATE_OWED, without a pause */
};

/* The agent's order as a whole: gives `want`, and the others where they are asked for. */
uint32_t gate_order(struct liveshift_page *page, uint32_t *attempt, uint32_t *version);

/* Communicators are about to be torn down: marks them `down`, unless a thread has opened the gate
   because the agent fell silent (false). From here on none does. */
bool gate_hold_shut(struct gate *gate, uint32_t attempt);

void gate_init(struct gate *gate, struct liveshift_page *page);

/* Whether a thread may take these numbers, all or none; with GATE_GO they are taken. Never waits. */
enum gate_verdict gate_try(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid,
                           struct gate_visit *visit);

/* Returns when the numbers are taken. */
void gate_pass(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid);

/* The slow half of gate_begin. */
void gate_wait(struct gate *gate, struct liveshift_clock *clock, uint32_t kind, int32_t tid);

/* Takes a clock's next number for one operation, waiting if the gate is closed. */
static inline void gate_begin(struct gate *gate, struct liveshift_clock *clock, uint32_t kind,
                              int32_t tid) {
    struct liveshift_page *page = gate->page;
    atomic_fetch_add_explicit(&page->counters[kind].started, 1, memory_order_relaxed);
    atomic_store_explicit(&clock->owner, tid, memory_order_relaxed);
    atomic_store_explicit(&clock->kind, kind, memory_order_relaxed);
    atomic_fetch_add(&clock->announced, 1);
    if (__builtin_expect(atomic_load(&page->order.want) != LIVESHIFT_OPEN, 0))
        gate_wait(gate, clock, kind, tid);
}

/* The operation's call has come back. */
static inline void gate_end(struct liveshift_clock *clock) {
    atomic_fetch_add_explicit(&clock->returned, 1, memory_order_release);
}

/* Begin a group of operations: true, if the gate is open and its members may announce themselves
   one by one (gate_announce), until gate_group_end; false: collect them and gate_pass them all. */
bool gate_group_begin(struct gate *gate);
void gate_group_end(struct gate *gate);

/* A member of a group that was begun with the gate open. */
static inline void gate_announce(struct gate *gate, struct liveshift_clock *clock, uint32_t kind,
                                 int32_t tid) {
    atomic_fetch_add_explicit(&gate->page->counters[kind].started, 1, memory_order_relaxed);
    atomic_store_explicit(&clock->owner, tid, memory_order_relaxed);
    atomic_store_explicit(&clock->kind, kind, memory_order_relaxed);
    atomic_fetch_add(&clock->announced, 1);
}

/* Communication that has no clock: never held up, and no boundary while it lasts. */
void gate_untracked_begin(struct gate *gate);
void gate_untracked_end(struct gate *gate);

#endif
