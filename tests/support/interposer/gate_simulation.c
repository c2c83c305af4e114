/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The interposer's gate for tests/support/interposer/gate_world.py. One process holds the pages and gates of many
 * simulated processes. The threads are coroutines of the caller, so nothing here waits. gate.c and
 * clocks.c are compiled unchanged; process.c is included, since it makes the page.
 */
#include "gate/clocks.h"

#include "gate/process.c"

struct gate *sim_process(const char *draft, const char *path, int pid, int rank) {
    struct gate *gate = malloc(sizeof *gate);
    struct liveshift_page *page = gate != NULL ? put_page(draft, path, pid) : NULL;
    if (page == NULL) {
        free(gate);
        return NULL;
    }
    page->rank = rank;
    gate_init(gate, page);
    return gate;
}

void sim_process_end(struct gate *gate) {
    munmap(gate->page, LIVESHIFT_PAGE_SIZE);
    free(gate);
}

struct liveshift_communicator *sim_communicator(struct gate *gate, int library, uint64_t id,
                                                int size, int rank, const char *name) {
    struct communicator_info made = {.library = library,
                                     .id = id,
                                     .size = size,
                                     .rank = rank,
                                     .device = -1,
                                     .made_by = 'I',
                                     .name = name};
    return communicator_add(gate, &made);
}

uint32_t sim_clock(struct gate *gate, struct liveshift_communicator *of, int from, int to) {
    struct liveshift_clock *clock = clock_add(gate, of, from, to);
    return clock != NULL ? (uint32_t)(clock - liveshift_clocks(gate->page)) : UINT32_MAX;
}

void sim_communicator_end(struct gate *gate, struct liveshift_communicator *row) {
    communicator_end(gate, row);
}

/* gate_begin in two parts, so that a simulation can do something between them. */
void sim_announce(struct gate *gate, uint32_t clock, uint32_t kind, int32_t tid) {
    gate_announce(gate, &liveshift_clocks(gate->page)[clock], kind, tid);
}

bool sim_is_open(struct gate *gate) {
    return atomic_load(&gate->page->order.want) == LIVESHIFT_OPEN;
}

int sim_try(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid,
            struct gate_waiter *waiter) {
    return gate_try(gate, wants, n, tid, waiter);
}

void sim_end(struct gate *gate, uint32_t clock) { gate_end(&liveshift_clocks(gate->page)[clock]); }

bool sim_group_begin(struct gate *gate) { return gate_group_begin(gate); }

void sim_group_end(struct gate *gate) { gate_group_end(gate); }

void sim_untracked_begin(struct gate *gate) { gate_untracked_begin(gate); }

void sim_untracked_end(struct gate *gate) { gate_untracked_end(gate); }
