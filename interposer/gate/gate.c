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
#define LOOK_MS 20

struct order {
    uint32_t want, attempt, version;
};

static uint32_t check_of(const struct order *o) {
    return ~(o->want * 0x01000193u ^ o->attempt * 0x9e3779b1u ^ o->version);
}

/* The agent's order as a whole. If the agent is just writing it, the gate counts as armed. */
static struct order order_of(struct liveshift_page *page) {
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

uint32_t gate_order(struct liveshift_page *page, uint32_t *attempt, uint32_t *version) {
    struct order o = order_of(page);
    *attempt = o.attempt;
    *version = o.version;
    return o.want;
}

static bool same(const struct order *a, const struct order *b) {
    return a->want == b->want && a->attempt == b->attempt && a->version == b->version;
}

static uint32_t clocks_used(struct liveshift_page *page) {
    uint32_t used = atomic_load(&page->clocks);
    return used < LIVESHIFT_PAGE_CLOCKS ? used : LIVESHIFT_PAGE_CLOCKS;
}

/* How many numbers threads have taken that have passed. A thread between its announcement and the
   mutex makes the result too high for a moment. This may hold other threads back for that moment,
   but lets none pass. */
static uint64_t admitted(struct gate *gate, uint32_t row) {
    uint64_t announced = atomic_load(&liveshift_clocks(gate->page)[row].announced);
    return announced > gate->waiting[row] ? announced - gate->waiting[row] : 0;
}

enum debt { NONE, OWN, ANOTHERS };

static uint32_t row_of(struct gate *gate, uint64_t id) {
    struct liveshift_clock *clocks = liveshift_clocks(gate->page);
    uint32_t row = 0, used = clocks_used(gate->page);
    while (row < used && atomic_load(&clocks[row].id) != id)
        row++;
    return row < used ? row : UINT32_MAX;
}

/* Which thread owes an operation on a clock of which no thread has taken a number: a thread that
   has used the communicator otherwise. If there is none: the only thread that ever came to the
   gate. */
static enum debt unowned(struct gate *gate, uint32_t communicator, int32_t tid) {
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
            return OWN;
        used = true;
    }
    return alone && !used ? OWN : ANOTHERS;
}

/* Whether this process owes an operation, and whether this thread owes it. */
static enum debt debt_of(struct gate *gate, int32_t tid) {
    struct liveshift_page *page = gate->page;
    struct liveshift_clock *clocks = liveshift_clocks(page);
    enum debt found = NONE;
    for (uint32_t row = 0; row < clocks_used(page); row++) {
        if (atomic_load(&clocks[row].id) == 0 ||
            admitted(gate, row) >= atomic_load(&clocks[row].target))
            continue;
        int32_t owner = atomic_load(&clocks[row].owner);
        found = owner == tid ? OWN
                : owner != 0 ? ANOTHERS
                             : unowned(gate, clocks[row].communicator, tid);
        if (found == OWN)
            return OWN;
    }
    uint32_t asked = atomic_load(&page->order.asked);
    for (uint32_t i = 0; i < asked && i < LIVESHIFT_PAGE_ASKS; i++) {
        if (row_of(gate, atomic_load(&page->asks[i].id)) != UINT32_MAX)
            continue;
        found = unowned(gate, atomic_load(&page->asks[i].communicator), tid);
        if (found == OWN)
            return OWN;
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
        if (admitted(gate, wants[i].clock) + further > atomic_load(&clocks[wants[i].clock].target))
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
            admitted(gate, wants[i].clock) > atomic_load(&clocks[wants[i].clock].returned))
            return true;
    return false;
}

/* How long a thread waits before it passes beyond the target; see gate.h. */
static uint32_t patience_ms(struct gate *gate, const struct gate_want *wants, unsigned n,
                            enum debt debt) {
    struct liveshift_clock *clocks = liveshift_clocks(gate->page);
    for (unsigned i = 0; i < n; i++)
        if (!clocks[wants[i].clock].blocking ||
            (debt == NONE && clocks[wants[i].clock].from >= 0)) /* a program may send and send */
            return GATE_PATIENCE_MS;
    return GATE_PATIENCE_WORKERS_MS;
}

static void enter(struct gate *gate, struct gate_want *wants, unsigned n) {
    for (unsigned i = 0; i < n; i++)
        if (wants[i].announced && !wants[i].entered) {
            gate->waiting[wants[i].clock] += wants[i].count;
            wants[i].entered = true;
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
        uint64_t number = admitted(gate, wants[i].clock);
        if (!open && number > atomic_load(&clock->target) && number > atomic_load(&clock->raised)) {
            atomic_store(&clock->raised, number);
            raised = true;
        }
    }
    if (raised)
        atomic_fetch_add(&page->answer.changes, 1);
    struct order now = order_of(page);
    bool taken = same(seen, &now) || (seen->want != LIVESHIFT_OPEN && now.want == LIVESHIFT_OPEN);
    for (unsigned i = 0; i < n; i++) {
        struct liveshift_clock *clock = &clocks[wants[i].clock];
        if (taken) {
            atomic_store_explicit(&clock->owner, tid, memory_order_relaxed);
            atomic_store_explicit(&clock->kind, wants[i].kind, memory_order_relaxed);
            if (!wants[i].announced)
                atomic_fetch_add_explicit(&page->counters[wants[i].kind].started, wants[i].count,
                                          memory_order_relaxed);
            wants[i].entered = false;
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
static bool lease_is_over(struct gate *gate, const struct order *o, struct gate_visit *visit) {
    struct liveshift_page *page = gate->page;
    uint32_t beat = atomic_load(&page->order.beat), lease = atomic_load(&page->order.lease_ms);
    if (beat != visit->beat) {
        visit->beat = beat;
        visit->silent_ms = 0;
    }
    return lease != 0 && visit->silent_ms >= lease && o->want < LIVESHIFT_TEARDOWN &&
           atomic_load(&page->answer.down) == 0;
}

enum gate_verdict gate_try(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid,
                           struct gate_visit *visit) {
    enum gate_verdict verdict = GATE_GO;
    pthread_mutex_lock(&gate->deciding);
    enter(gate, wants, n);
    struct order o = order_of(gate->page);
    if (o.want != LIVESHIFT_OPEN && lease_is_over(gate, &o, visit))
        atomic_store(&gate->page->answer.reopened, o.attempt);
    bool open = o.want == LIVESHIFT_OPEN || atomic_load(&gate->page->answer.reopened) == o.attempt;
    if (!open) {
        if (gate->progress != visit->progress) {
            visit->progress = gate->progress;
            visit->stalled_ms = 0;
        }
        if (o.want == LIVESHIFT_ARMED)
            verdict = GATE_ARMED;
        else if (o.want != LIVESHIFT_TARGET)
            verdict = GATE_SHUT;
        else if (!within_targets(gate, wants, n)) {
            enum debt debt = debt_of(gate, tid);
            bool patient = visit->stalled_ms < patience_ms(gate, wants, n, debt);
            if (debt == ANOTHERS && patient && visit->owed_ms < GATE_OWED_MS)
                verdict = GATE_OWED;
            else if (debt == NONE && (patient || !in_flight(gate, wants, n)))
                verdict = GATE_PARK;
        }
    }
    if (verdict == GATE_GO && !take(gate, wants, n, tid, &o, open))
        verdict = GATE_ARMED;
    pthread_mutex_unlock(&gate->deciding);
    return verdict;
}

bool gate_hold_shut(struct gate *gate, uint32_t attempt) {
    pthread_mutex_lock(&gate->deciding);
    bool shut = atomic_load(&gate->page->answer.reopened) != attempt;
    if (shut)
        atomic_store(&gate->page->answer.down, 1);
    pthread_mutex_unlock(&gate->deciding);
    return shut;
}

void gate_init(struct gate *gate, struct liveshift_page *page) {
    memset(gate, 0, sizeof *gate);
    gate->page = page;
    pthread_mutex_init(&gate->deciding, NULL);
}

/* A row of the page that shows the agent where this thread is; NULL: all rows are taken. */
static struct liveshift_thread *seat(struct liveshift_page *page, int32_t tid) {
    for (unsigned i = 0; i < LIVESHIFT_PAGE_THREADS; i++) {
        int32_t nobody = 0;
        if (atomic_compare_exchange_strong(&page->threads[i].tid, &nobody, tid))
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
static uint32_t doze(struct liveshift_page *page, uint32_t check, uint32_t ms) {
    const struct timespec look = {0, ms * 1000000L};
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    /* Not private: the agent wakes through its own mapping of the file. */
    syscall(SYS_futex, &page->order.check, FUTEX_WAIT, check, &look, NULL, 0);
    return elapsed_ms(&began, ms);
}

void gate_pass(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid) {
    static const char state_of[] = {
        [GATE_ARMED] = 'A', [GATE_PARK] = 'P', [GATE_OWED] = 'O', [GATE_SHUT] = 'C'};
    struct liveshift_page *page = gate->page;
    struct gate_visit visit = {.beat = atomic_load(&page->order.beat)};
    struct liveshift_thread *row = NULL;
    int before = errno;
    for (;;) {
        uint32_t check = atomic_load(&page->order.check);
        enum gate_verdict verdict = gate_try(gate, wants, n, tid, &visit);
        if (verdict == GATE_GO)
            break;
        if (row == NULL && (row = seat(page, tid)) != NULL) {
            atomic_store(&row->clock, wants[0].clock);
            atomic_store(&row->wants, n);
            atomic_store(&row->kind, wants[0].kind);
        }
        if (row != NULL)
            atomic_store(&row->state, (uint32_t)state_of[verdict]);
        void (*errand)(uint32_t) = atomic_load(&gate->errand);
        if (errand != NULL && verdict == GATE_SHUT)
            errand(wants[0].kind);
        bool looking = verdict == GATE_PARK || verdict == GATE_OWED;
        bool soon = looking && visit.stalled_ms < GATE_PATIENCE_MS;
        uint32_t slept = doze(page, check, soon ? GATE_PATIENCE_WORKERS_MS : LOOK_MS);
        /* Time spent waiting for targets, or behind a shut gate, does not count as patience. */
        visit.stalled_ms = looking ? visit.stalled_ms + slept : 0;
        visit.owed_ms = verdict == GATE_OWED ? visit.owed_ms + slept : 0;
        visit.silent_ms += slept;
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
