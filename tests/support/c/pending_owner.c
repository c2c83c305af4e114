/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which thread owns a pending operation when no thread has taken a number of the clock yet, and how
 * long another thread waits for it.
 * needs: gate/clocks.c gate/process.c
 */
#include "agent.h"
#include "gate/clocks.h"

#include "gate/gate.c"

#define ME 11
#define OTHER 12

int main(int argc, char **argv) {
    CHECK(argc == 3);
    setenv("LIVESHIFT_PAGES", argv[2], 1);
    struct gate *gate = current_gate();
    struct communicator_info made = {
        .library = LIVESHIFT_NCCL, .id = 1, .size = 2, .rank = 0, .device = -1, .made_by = 'I'};
    struct liveshift_communicator *row = communicator_add(gate, &made);
    struct liveshift_clock *first = clock_add(gate, row, -1, -1);
    struct liveshift_clock *pair = clock_add(gate, row, 0, 1);
    made.id = 2;
    struct liveshift_clock *apart = clock_add(gate, communicator_add(gate, &made), -1, -1);
    CHECK_SAME(first - liveshift_clocks(gate->page), 0);

    CHECK_SAME(pending_without_owner(gate, first->communicator, ME),
               PENDING_OWN); /* the only thread that came here */
    atomic_store(&first->owner, OTHER);
    CHECK_SAME(pending_without_owner(gate, first->communicator, ME), PENDING_OTHERS);
    CHECK_SAME(pending_without_owner(gate, first->communicator, OTHER), PENDING_OWN);
    CHECK_SAME(pending_without_owner(gate, apart->communicator, ME),
               PENDING_OTHERS); /* it is not alone */
    atomic_store(&first->owner, ME);
    CHECK_SAME(pending_without_owner(gate, first->communicator, ME), PENDING_OWN);
    CHECK_SAME(pending_without_owner(gate, apart->communicator, ME), PENDING_OWN); /* it is alone */

    /* A program may send again and again, also from its rank 0. If nothing is pending, the thread
       uses the longer limit only for such sends. */
    struct gate_want want = {.kind = 1, .count = 1};
    first->blocking = pair->blocking = 1;
    want.clock = (uint32_t)(pair - liveshift_clocks(gate->page));
    CHECK_SAME(stall_limit_ms(gate, &want, 1, PENDING_NONE), GATE_STALL_LIMIT_MS);
    CHECK_SAME(stall_limit_ms(gate, &want, 1, PENDING_OWN), GATE_STALL_LIMIT_WORKERS_MS);
    want.clock = 0;
    CHECK_SAME(stall_limit_ms(gate, &want, 1, PENDING_NONE), GATE_STALL_LIMIT_WORKERS_MS);
    first->blocking = 0;
    CHECK_SAME(stall_limit_ms(gate, &want, 1, PENDING_NONE), GATE_STALL_LIMIT_MS);
    return 0;
}
