/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate: every operation with peers passes here, on the application's own thread.
 *
 * An open gate costs two counters and one load. A closed gate brings this process to the boundary
 * that the orchestrator looks for: the least cut at which every operation that was begun anywhere
 * has been begun everywhere (facts: the star form of MANA's collective clock, arXiv 2212.05701).
 *
 * A thread *announces* an operation: it takes the clock's next number before it looks at the gate.
 * The agent closes the gate before it looks at the clocks. One of the two sees the other. So the
 * operations that were announced when the agent looked are exactly those that had begun.
 *
 * LIVESHIFT_TARGET: numbers up to the target pass. An operation is *pending* in a process if its
 * number is not above the target of its clock and no thread has passed with it. A thread that wants
 * a number beyond the target
 * - parks, if nothing is pending in its process. One exception: if an earlier operation of the
 *   wanted clock is still inside a blocking call (gloo), the thread passes after its stall limit,
 *   since the peers may have begun with the later operation;
 * - passes and raises the target, if the thread itself owns a pending operation. The pending one
 *   comes later in its program, so this operation is in every cut that holds the pending one;
 * - waits GATE_STALL_LIMIT_MS for another thread that owns a pending operation, and passes then:
 *   that thread may be waiting for this one. Each time a thread gets a number, the time starts
 *   again; the thread waits GATE_PENDING_LIMIT_MS at most.
 * The thread that took a clock's last number owns its next one (the owner rule: without it, threads
 * raise targets for each other's pending operations without end). If no thread has taken a number
 * yet, or the clock does not exist yet (struct liveshift_missing_clock), a thread that has used the
 * communicator is the owner.
 */
#ifndef LIVESHIFT_INTERPOSER_GATE_H
#define LIVESHIFT_INTERPOSER_GATE_H

#include "hooks/kinds.h"
#include "page.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* How long no thread may get a number before a waiting thread passes beyond its target. */
#define GATE_STALL_LIMIT_MS 50

/* The most that a thread waits for another thread's pending operation, although threads still get
   numbers. Progress by other threads does not prove that the pending operation is coming. Without
   this limit, threads that pass again and again, each after its own stall limit, could hold up for
   ever a thread on which the pending operation depends. Each look at the gate counts at least 1 ms,
   so the wait also ends when many new orders wake the thread. */
#define GATE_PENDING_LIMIT_MS 500

/* The stall limit for gloo. Each communicator has worker threads of its own that run its
   collectives, while the program's thread waits for one after the other. So the owner of a pending
   operation is hardly ever the thread at the gate, even if one program thread started both
   operations. And two workers may take up two collectives in another order than on other ranks. A
   long wait is not worth it. */
#define GATE_STALL_LIMIT_WORKERS_MS 5

/* One process's gate: the state that it keeps besides the page. */
struct gate {
    struct liveshift_page *page;
    pthread_mutex_t lock; /* taken by threads that found the gate closed; never across a call */
    uint64_t progress;    /* how often threads took numbers while the gate was closed */
    /* A function that a thread calls while it waits at the closed gate, with the kind of operation
       that the thread wants; NULL: none. The function must not pass the gate. */
    void (*_Atomic callback)(uint32_t kind);
    uint32_t waiting[LIVESHIFT_PAGE_CLOCKS]; /* announced numbers whose threads wait here */
};

/* Numbers wanted of one clock. */
struct gate_want {
    uint32_t clock; /* row */
    uint32_t kind;  /* enum kind */
    uint64_t count;
    bool announced; /* the fast path has taken the numbers already */
    bool counted;   /* counted in `waiting`; only the gate uses this */
};

enum gate_verdict {
    GATE_GO,    /* the numbers are taken */
    GATE_ARMED, /* wait: the agent has not given targets yet */
    GATE_PARK, /* wait until a target grows or the gate opens: nothing is pending in this process */
    GATE_PENDING, /* wait: another thread owns a pending operation */
    GATE_CLOSED   /* wait: nothing passes */
};

/* How long a thread has been at the gate; zero it before the first gate_try. The waiting thread
   adds the times, in milliseconds in which this process was awake: a frozen process does not
   age. */
struct gate_waiter {
    uint64_t progress; /* the gate's `progress` when this thread last saw it change */
    uint32_t stalled_ms;
    uint32_t heartbeat;
    uint32_t silent_ms;
    uint32_t pending_ms; /* how long GATE_PENDING has lasted without a break */
};

/* What the agent orders: three numbers of struct liveshift_order. */
struct order {
    uint32_t want, attempt, version;
};

/* The agent's order as a whole. If the agent is just writing it, the gate counts as armed. */
struct order gate_order(struct liveshift_page *page);

static inline bool same_order(const struct order *a, const struct order *b) {
    return a->want == b->want && a->attempt == b->attempt && a->version == b->version;
}

/* The service thread calls this before it tears communicators down. It marks them `down`; from then
   on no thread opens the gate by itself. False: a thread has opened the gate already because the
   agent sent no heartbeat. */
bool gate_keep_closed(struct gate *gate, uint32_t attempt);

void gate_init(struct gate *gate, struct liveshift_page *page);

/* Decides whether a thread may take all these numbers. GATE_GO: the thread has taken them.
   Otherwise it has taken none. Never waits. */
enum gate_verdict gate_try(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid,
                           struct gate_waiter *waiter);

/* Waits until the thread has taken the numbers. */
void gate_pass(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid);

/* The slow half of gate_begin. */
void gate_wait(struct gate *gate, struct liveshift_clock *clock, uint32_t kind, int32_t tid);

/* Announces one operation: takes the clock's next number. The caller looks at the gate afterwards,
   unless the operation is in a group that was begun with the gate open. */
static inline void gate_announce(struct gate *gate, struct liveshift_clock *clock, uint32_t kind,
                                 int32_t tid) {
    atomic_fetch_add_explicit(&gate->page->counters[kind].started, 1, memory_order_relaxed);
    atomic_store_explicit(&clock->owner, tid, memory_order_relaxed);
    atomic_store_explicit(&clock->kind, kind, memory_order_relaxed);
    atomic_fetch_add(&clock->announced, 1);
}

/* Takes a clock's next number for one operation; waits if the gate is closed. */
static inline void gate_begin(struct gate *gate, struct liveshift_clock *clock, uint32_t kind,
                              int32_t tid) {
    gate_announce(gate, clock, kind, tid);
    if (__builtin_expect(atomic_load(&gate->page->order.want) != LIVESHIFT_OPEN, 0))
        gate_wait(gate, clock, kind, tid);
}

/* Counts that the operation's real call has come back. */
static inline void gate_end(struct liveshift_clock *clock) {
    atomic_fetch_add_explicit(&clock->returned, 1, memory_order_release);
}

/* Begins a group of operations. True: the gate is open, and the caller announces each member
   (gate_announce) until gate_group_end. False: the caller must collect the members and pass them
   all at once (gate_pass). */
bool gate_group_begin(struct gate *gate);
void gate_group_end(struct gate *gate);

/* Communication that has no clock. The gate never holds it up, and there is no boundary while it
   lasts. */
void gate_untracked_begin(struct gate *gate);
void gate_untracked_end(struct gate *gate);

#endif
