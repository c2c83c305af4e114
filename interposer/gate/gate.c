/* SPDX-License-Identifier: Apache-2.0 */
/* Decides which thread may pass the closed gate, and lets threads wait; gate.h has the rule. */

#include "gate.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A thread at the gate looks again after this time, even if nothing wakes it. */
#define POLL_MS 20

static uint32_t check_of(const struct order *o) {
    return ~(o->want * 0x01000193u ^ o->attempt * 0x9e3779b1u ^ o->version);
}

struct order gate_order(struct liveshift_page *page) {
    struct order o;
    for (int tries = 0; tries < 1000; tries++) {
        uint32_t check = atomic_load(&page->order.check);
        o.want = atomic_load(&page->order.want);
        o.attempt = atomic_load(&page->order.attempt);
        o.version = atomic_load(&page->order.version);
        if (check == check_of(&o) && check == atomic_load(&page->order.check))
            return o;
        sched_yield();
    }
    o.want = LIVESHIFT_ARMED;
    return o;
}

static uint32_t clocks_used(struct liveshift_page *page) {
    uint32_t used = atomic_load(&page->clocks);
    return used < LIVESHIFT_PAGE_CLOCKS ? used : LIVESHIFT_PAGE_CLOCKS;
}

/* How many numbers threads have taken that have passed. A thread between its announcement and the
   mutex makes the result too high for a moment. This may hold other threads back for that moment,
   but lets none pass. */
static uint64_t passed(struct gate *gate, uint32_t row) {
    uint64_t announced = atomic_load(&liveshift_clocks(gate->page)[row].announced);
    return announced > gate->waiting[row] ? announced - gate->waiting[row] : 0;
}

enum pending { PENDING_NONE, PENDING_OWN, PENDING_OTHERS };

static uint32_t row_of(struct gate *gate, uint64_t id) {
    struct liveshift_clock *clocks = liveshift_clocks(gate->page);
    uint32_t row = 0, used = clocks_used(gate->page);
    while (row < used && atomic_load(&clocks[row].id) != id)
        row++;
    return row < used ? row : UINT32_MAX;
}

/* Who owns the pending operation on a clock of which no thread has taken a number: a thread that
   has used the communicator otherwise. If there is none: the only thread that ever came to the
   gate. */
static enum pending pending_without_owner(struct gate *gate, uint32_t communicator, int32_t tid) {
    struct liveshift_clock *clocks = liveshift_clocks(gate->page);
    bool alone = true, used = false;
    for (uint32_t row = 0; row < clocks_used(gate->page); row++) {
        int32_t owner = atomic_load(&clocks[row].id) != 0 ? atomic_load(&clocks[row].owner) : 0;
        if (owner == 0)
            continue;
        alone = alone && owner == tid;
        if (clocks[row].communicator != communicator)
            continue;
        if (owner == tid)
            return PENDING_OWN;
        used = true;
    }
    return alone && !used ? PENDING_OWN : PENDING_OTHERS;
}

/* Whether an operation is pending in this process, and whether this thread owns one. */
static enum pending pending_for(struct gate *gate, int32_t tid) {
    struct liveshift_page *page = gate->page;
    struct liveshift_clock *clocks = liveshift_clocks(page);
    enum pending found = PENDING_NONE;
    for (uint32_t row = 0; row < clocks_used(page); row++) {
        if (atomic_load(&clocks[row].id) == 0 ||
            passed(gate, row) >= atomic_load(&clocks[row].target))
            continue;
        int32_t owner = atomic_load(&clocks[row].owner);
        found = owner == tid ? PENDING_OWN
                : owner != 0 ? PENDING_OTHERS
                             : pending_without_owner(gate, clocks[row].communicator, tid);
        if (found == PENDING_OWN)
            return PENDING_OWN;
    }
    uint32_t missing_count = atomic_load(&page->order.missing_count);
    for (uint32_t i = 0; i < missing_count && i < LIVESHIFT_PAGE_MISSING_CLOCKS; i++) {
        if (row_of(gate, atomic_load(&page->missing_clocks[i].id)) != UINT32_MAX)
            continue;
        found =
            pending_without_owner(gate, atomic_load(&page->missing_clocks[i].communicator), tid);
        if (found == PENDING_OWN)
            return PENDING_OWN;
    }
    return found;
}

/* Whether the targets allow all the wanted numbers. */
static bool within_targets(struct gate *gate, const struct gate_want *wants, unsigned n) {
    struct liveshift_clock *clocks = liveshift_clocks(gate->page);
    for (unsigned i = 0; i < n; i++) {
        uint64_t further = wants[i].count;
        for (unsigned j = 0; j < i; j++) /* the same clock twice in a group */
            if (wants[j].clock == wants[i].clock)
                further += wants[j].count;
        if (passed(gate, wants[i].clock) + further > atomic_load(&clocks[wants[i].clock].target))
            return false;
    }
    return true;
}

/* Whether an earlier operation of a wanted clock waits for its peers inside its call. If several
   threads serve one communicator (gloo's workers), the peers may have begun with the later one. */
static bool in_flight(struct gate *gate, const struct gate_want *wants, unsigned n) {
    struct liveshift_clock *clocks = liveshift_clocks(gate->page);
    for (unsigned i = 0; i < n; i++)
        if (clocks[wants[i].clock].blocking &&
            passed(gate, wants[i].clock) > atomic_load(&clocks[wants[i].clock].returned))
            return true;
    return false;
}

/* How long no thread may get a number before this one passes beyond its target; see gate.h. */
static uint32_t stall_limit_ms(struct gate *gate, const struct gate_want *wants, unsigned n,
                               enum pending pending) {
    struct liveshift_clock *clocks = liveshift_clocks(gate->page);
    for (unsigned i = 0; i < n; i++)
        if (!clocks[wants[i].clock].blocking ||
            (pending == PENDING_NONE &&
             clocks[wants[i].clock].from >= 0)) /* a program may send and send */
            return GATE_STALL_LIMIT_MS;
    return GATE_STALL_LIMIT_WORKERS_MS;
}

static void count_waiting(struct gate *gate, struct gate_want *wants, unsigned n) {
    for (unsigned i = 0; i < n; i++)
        if (wants[i].announced && !wants[i].counted) {
            gate->waiting[wants[i].clock] += wants[i].count;
            wants[i].counted = true;
        }
}

/*
 * Takes the numbers. If the agent has given another order meanwhile, it may have looked at the
 * clocks before it could see what this thread announces or raises. Then the thread takes nothing.
 * (A target that it raised stays raised, since the thread still wants the number.)
 */
static bool take(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid,
                 const struct order *seen, bool open) {
    struct liveshift_page *page = gate->page;
    struct liveshift_clock *clocks = liveshift_clocks(page);
    bool raised = false;
    for (unsigned i = 0; i < n; i++) {
        struct liveshift_clock *clock = &clocks[wants[i].clock];
        if (wants[i].announced)
            gate->waiting[wants[i].clock] -= wants[i].count;
        else
            atomic_fetch_add(&clock->announced, wants[i].count);
        uint64_t number = passed(gate, wants[i].clock);
        if (!open && number > atomic_load(&clock->target) && number > atomic_load(&clock->raised)) {
            atomic_store(&clock->raised, number);
            raised = true;
        }
    }
    if (raised)
        atomic_fetch_add(&page->answer.changes, 1);
    struct order now = gate_order(page);
    bool taken =
        same_order(seen, &now) || (seen->want != LIVESHIFT_OPEN && now.want == LIVESHIFT_OPEN);
    for (unsigned i = 0; i < n; i++) {
        struct liveshift_clock *clock = &clocks[wants[i].clock];
        if (taken) {
            atomic_store_explicit(&clock->owner, tid, memory_order_relaxed);
            atomic_store_explicit(&clock->kind, wants[i].kind, memory_order_relaxed);
            if (!wants[i].announced)
                atomic_fetch_add_explicit(&page->counters[wants[i].kind].started, wants[i].count,
                                          memory_order_relaxed);
            wants[i].counted = false;
        } else if (wants[i].announced)
            gate->waiting[wants[i].clock] += wants[i].count;
        else
            atomic_fetch_sub(&clock->announced, wants[i].count);
    }
    if (taken && !open)
        gate->progress++;
    return taken;
}

/* Whether the agent has been silent for its lease, so that this thread must open the gate. */
static bool lease_is_over(struct gate *gate, const struct order *o, struct gate_waiter *waiter) {
    struct liveshift_page *page = gate->page;
    uint32_t heartbeat = atomic_load(&page->order.heartbeat),
             lease = atomic_load(&page->order.lease_ms);
    if (heartbeat != waiter->heartbeat) {
        waiter->heartbeat = heartbeat;
        waiter->silent_ms = 0;
    }
    return lease != 0 && waiter->silent_ms >= lease && o->want < LIVESHIFT_TEARDOWN &&
           atomic_load(&page->answer.down) == 0;
}

enum gate_verdict gate_try(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid,
                           struct gate_waiter *waiter) {
    enum gate_verdict verdict = GATE_GO;
    pthread_mutex_lock(&gate->lock);
    count_waiting(gate, wants, n);
    struct order o = gate_order(gate->page);
    if (o.want != LIVESHIFT_OPEN && lease_is_over(gate, &o, waiter))
        atomic_store(&gate->page->answer.reopened, o.attempt);
    bool open = o.want == LIVESHIFT_OPEN || atomic_load(&gate->page->answer.reopened) == o.attempt;
    if (!open) {
        if (gate->progress != waiter->progress) {
            waiter->progress = gate->progress;
            waiter->stalled_ms = 0;
        }
        if (o.want == LIVESHIFT_ARMED)
            verdict = GATE_ARMED;
        else if (o.want != LIVESHIFT_TARGET)
            verdict = GATE_CLOSED;
        else if (!within_targets(gate, wants, n)) {
            enum pending pending = pending_for(gate, tid);
            bool within_limit = waiter->stalled_ms < stall_limit_ms(gate, wants, n, pending);
            if (pending == PENDING_OTHERS && within_limit &&
                waiter->pending_ms < GATE_PENDING_LIMIT_MS)
                verdict = GATE_PENDING;
            else if (pending == PENDING_NONE && (within_limit || !in_flight(gate, wants, n)))
                verdict = GATE_PARK;
        }
    }
    if (verdict == GATE_GO && !take(gate, wants, n, tid, &o, open))
        verdict = GATE_ARMED;
    pthread_mutex_unlock(&gate->lock);
    return verdict;
}

bool gate_keep_closed(struct gate *gate, uint32_t attempt) {
    pthread_mutex_lock(&gate->lock);
    bool closed = atomic_load(&gate->page->answer.reopened) != attempt;
    if (closed)
        atomic_store(&gate->page->answer.down, 1);
    pthread_mutex_unlock(&gate->lock);
    return closed;
}

void gate_init(struct gate *gate, struct liveshift_page *page) {
    memset(gate, 0, sizeof *gate);
    gate->page = page;
    pthread_mutex_init(&gate->lock, NULL);
}

/* A row of the page that shows the agent where this thread is; NULL: all rows are taken. */
static struct liveshift_thread *take_thread_row(struct liveshift_page *page, int32_t tid) {
    for (unsigned i = 0; i < LIVESHIFT_PAGE_THREADS; i++) {
        int32_t free_row = 0;
        if (atomic_compare_exchange_strong(&page->threads[i].tid, &free_row, tid))
            return &page->threads[i];
    }
    return NULL;
}

static uint32_t elapsed_ms(const struct timespec *since, uint32_t most) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t ms =
        (now.tv_sec - since->tv_sec) * 1000LL + (now.tv_nsec - since->tv_nsec + 999999) / 1000000;
    /* At most the time that this thread asked for: in the rest it was frozen or had no core. */
    return ms > most ? most : ms < 0 ? 0 : (uint32_t)ms;
}

/* Sleeps until the agent's order changes, at most `ms`; returns how many milliseconds it slept. */
static uint32_t wait_for_order(struct liveshift_page *page, uint32_t check, uint32_t ms) {
    const struct timespec look = {0, ms * 1000000L};
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    /* Not private: the agent wakes through its own mapping of the file. */
    syscall(SYS_futex, &page->order.check, FUTEX_WAIT, check, &look, NULL, 0);
    return elapsed_ms(&began, ms);
}

void gate_pass(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid) {
    static const char state_of[] = {
        [GATE_ARMED] = 'A', [GATE_PARK] = 'P', [GATE_PENDING] = 'O', [GATE_CLOSED] = 'C'};
    struct liveshift_page *page = gate->page;
    struct gate_waiter waiter = {.heartbeat = atomic_load(&page->order.heartbeat)};
    struct liveshift_thread *row = NULL;
    int before = errno;
    for (;;) {
        uint32_t check = atomic_load(&page->order.check);
        enum gate_verdict verdict = gate_try(gate, wants, n, tid, &waiter);
        if (verdict == GATE_GO)
            break;
        if (row == NULL && (row = take_thread_row(page, tid)) != NULL) {
            atomic_store(&row->clock, wants[0].clock);
            atomic_store(&row->wants, n);
            atomic_store(&row->kind, wants[0].kind);
        }
        if (row != NULL)
            atomic_store(&row->state, (uint32_t)state_of[verdict]);
        void (*callback)(uint32_t) = atomic_load(&gate->callback);
        if (callback != NULL && verdict == GATE_CLOSED)
            callback(wants[0].kind);
        bool may_pass_later = verdict == GATE_PARK || verdict == GATE_PENDING;
        bool soon = may_pass_later && waiter.stalled_ms < GATE_STALL_LIMIT_MS;
        uint32_t slept = wait_for_order(page, check, soon ? GATE_STALL_LIMIT_WORKERS_MS : POLL_MS);
        /* Time spent waiting for targets, or behind a closed gate, does not count as stalled. */
        waiter.stalled_ms = may_pass_later ? waiter.stalled_ms + slept : 0;
        waiter.pending_ms = verdict == GATE_PENDING ? waiter.pending_ms + slept : 0;
        waiter.silent_ms += slept;
    }
    if (row != NULL)
        atomic_store(&row->tid, 0);
    errno = before;
}

void gate_wait(struct gate *gate, struct liveshift_clock *clock, uint32_t kind, int32_t tid) {
    struct gate_want want = {.clock = (uint32_t)(clock - liveshift_clocks(gate->page)),
                             .kind = kind,
                             .count = 1,
                             .announced = true};
    gate_pass(gate, &want, 1, tid);
}

bool gate_group_begin(struct gate *gate) {
    atomic_fetch_add(&gate->page->answer.groups, 1);
    if (atomic_load(&gate->page->order.want) == LIVESHIFT_OPEN)
        return true;
    atomic_fetch_sub(&gate->page->answer.groups, 1);
    return false;
}

void gate_group_end(struct gate *gate) { atomic_fetch_sub(&gate->page->answer.groups, 1); }

void gate_untracked_begin(struct gate *gate) { atomic_fetch_add(&gate->page->answer.untracked, 1); }

void gate_untracked_end(struct gate *gate) { atomic_fetch_sub(&gate->page->answer.untracked, 1); }
