/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The interposer's gate for tests/support/interposer/gate_world.py: many processes' pages and gates in one process,
 * and threads that are the caller's coroutines, so nothing here waits. gate.c and clocks.c are
 * compiled beside it as they are; process.c is included for the page that it makes.
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
    struct communicator_made made = {.library = library,
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

/* The two halves of gate_begin, for something to happen between them. */
void sim_announce(struct gate *gate, uint32_t clock, uint32_t kind, int32_t tid) {
    gate_announce(gate, &liveshift_clocks(gate->page)[clock], kind, tid);
}

bool sim_is_open(struct gate *gate) {
    return atomic_load(&gate->page->order.want) == LIVESHIFT_OPEN;
}

int sim_try(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid,
            struct gate_visit *visit) {
    return gate_try(gate, wants, n, tid, visit);
}

void sim_end(struct gate *gate, uint32_t clock) { gate_end(&liveshift_clocks(gate->page)[clock]); }

bool sim_group_begin(struct gate *gate) { return gate_group_begin(gate); }

void sim_group_end(struct gate *gate) { gate_group_end(gate); }

void sim_untracked_begin(struct gate *gate) { gate_untracked_begin(gate); }

void sim_untracked_end(struct gate *gate) { gate_untracked_end(gate); }
