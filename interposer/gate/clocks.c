/* SPDX-License-Identifier: Apache-2.0 */
#include "clocks.h"

#include <stdio.h>
#include <string.h>

/* Threads give out and take back rows under it, and never hold it across a call of the library. */
static pthread_mutex_t rows = PTHREAD_MUTEX_INITIALIZER;

/* The attempt during which a clock's row was freed; 0: the gate was open. Under `rows`. */
static uint32_t freed_in[LIVESHIFT_PAGE_CLOCKS];

/* The attempt that the gate is closed for; 0: it is open. */
static uint32_t attempt_now(struct liveshift_page *page) {
    bool open = atomic_load(&page->order.want) == LIVESHIFT_OPEN;
    return open ? 0 : atomic_load(&page->order.attempt);
}

static uint32_t ordinal; /* of the last communicator of this process; under `rows` */

static void begin_child(void) { ordinal = 0; }

AT_FORK_LOCKED(FORK_ROWS, rows, begin_child)

uint64_t hash64(uint64_t seed, const void *bytes, size_t length) {
    uint64_t hash = seed != 0 ? seed : 0xcbf29ce484222325u;
    for (const unsigned char *at = bytes; length-- > 0; at++)
        hash = (hash ^ *at) * 0x100000001b3u;
    return hash != 0 ? hash : 1;
}

uint64_t clock_id(uint64_t communicator, int32_t from, int32_t to) {
    int32_t pair[2] = {from, to};
    return from < 0 ? communicator : hash64(communicator, pair, sizeof pair);
}

/* The next row of a table of which `used` are in use; UINT32_MAX: none. */
static uint32_t next_row(struct gate *gate, uint32_t used, uint32_t most, size_t at, size_t size,
                         const char *what) {
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    const char *why = process_next_row(gate, used, most, at, size);
    if (why == NULL)
        return used;
    process_warn_full(&warned, what, why, "it can't be brought to a collective boundary");
    return UINT32_MAX;
}

struct liveshift_communicator *communicator_add(struct gate *gate,
                                                const struct communicator_info *made) {
    struct liveshift_page *page = gate->page;
    struct liveshift_communicator *table = liveshift_communicators(page), *row = NULL;
    pthread_mutex_lock(&rows);
    uint32_t used = atomic_load(&page->communicators);
    uint32_t at = 0;
    /* We use the row of an ended one again only when all are in use: its last state may still be
       shown. */
    if (used >= LIVESHIFT_PAGE_COMMUNICATORS)
        while (at < used && atomic_load(&table[at].state) != LIVESHIFT_COMM_ENDED)
            at++;
    else
        at = used;
    if (at == used)
        at = next_row(gate, used, LIVESHIFT_PAGE_COMMUNICATORS, LIVESHIFT_COMMUNICATORS_AT,
                      sizeof *table, "communicator");
    if (at != UINT32_MAX) {
        row = &table[at];
        memset(row, 0, sizeof *row);
        row->library = made->library;
        row->id = made->id;
        row->parent = made->parent;
        row->size = made->size;
        row->rank = made->rank;
        row->device = made->device;
        row->made_by = (uint32_t)made->made_by;
        row->ordinal = ++ordinal;
        if (made->name != NULL)
            snprintf(row->name, sizeof row->name, "%s", made->name);
        atomic_store(&row->state, made->pending ? LIVESHIFT_COMM_FREE : LIVESHIFT_COMM_LIVE);
        if (at == used)
            atomic_store(&page->communicators, used + 1);
    }
    pthread_mutex_unlock(&rows);
    return row;
}

/* The target that the agent asks for on a clock that is being made; 0: none. */
static uint64_t target_of_missing(struct liveshift_page *page, uint64_t id) {
    uint32_t missing_count = atomic_load(&page->order.missing_count);
    for (uint32_t i = 0; i < missing_count && i < LIVESHIFT_PAGE_MISSING_CLOCKS; i++)
        if (atomic_load(&page->missing_clocks[i].id) == id)
            return atomic_load(&page->missing_clocks[i].target);
    return 0;
}

/* Whether a row may be used for another clock. Not if it was freed in this attempt: the agent may
   still write targets into rows that it has seen. Not if a thread is still inside a call of the old
   communicator, which another thread has aborted. */
static bool reusable(struct liveshift_clock *row, bool just_freed) {
    return atomic_load(&row->id) == 0 && !just_freed &&
           atomic_load(&row->announced) == atomic_load(&row->returned);
}

struct liveshift_clock *clock_add(struct gate *gate, struct liveshift_communicator *of,
                                  int32_t from, int32_t to) {
    struct liveshift_page *page = gate->page;
    struct liveshift_clock *table = liveshift_clocks(page), *row = NULL;
    pthread_mutex_lock(&rows);
    uint32_t used = atomic_load(&page->clocks), at = 0;
    uint32_t attempt = attempt_now(page);
    while (at < used && !reusable(&table[at], attempt != 0 && freed_in[at] == attempt))
        at++;
    if (at == used)
        at = next_row(gate, used, LIVESHIFT_PAGE_CLOCKS, LIVESHIFT_CLOCKS_AT, sizeof *table,
                      "clock");
    if (at != UINT32_MAX) {
        row = &table[at];
        memset(row, 0, sizeof *row);
        row->communicator = (uint32_t)(of - liveshift_communicators(page));
        row->from = from;
        row->to = to;
        row->blocking = of->library == LIVESHIFT_GLOO;
        uint64_t id = clock_id(of->id, from, to);
        if (attempt != 0)
            atomic_store(&row->target, target_of_missing(page, id));
        atomic_store(&row->id, id);
        if (at == used)
            atomic_store(&page->clocks, used + 1);
        if (atomic_load(&page->order.want) != LIVESHIFT_OPEN)
            atomic_fetch_add(&page->answer.changes, 1);
    }
    pthread_mutex_unlock(&rows);
    return row;
}

void communicator_end(struct gate *gate, struct liveshift_communicator *row) {
    struct liveshift_page *page = gate->page;
    uint32_t which = (uint32_t)(row - liveshift_communicators(page));
    struct liveshift_clock *table = liveshift_clocks(page);
    pthread_mutex_lock(&rows);
    atomic_store(&row->state, LIVESHIFT_COMM_ENDED);
    for (uint32_t at = 0; at < atomic_load(&page->clocks); at++)
        if (atomic_load(&table[at].id) != 0 && table[at].communicator == which) {
            atomic_fetch_add(&page->retired, atomic_load(&table[at].returned));
            atomic_store(&table[at].id, 0);
            freed_in[at] = attempt_now(page);
        }
    pthread_mutex_unlock(&rows);
}
