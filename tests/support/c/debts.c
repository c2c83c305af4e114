/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose debt it is when nobody has taken a number of a clock yet, and how long a thread waits.
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
    struct gate *gate = gate_here();
    struct communicator_made made = {
        .library = LIVESHIFT_NCCL, .id = 1, .size = 2, .rank = 0, .device = -1, .made_by = 'I'};
    struct liveshift_communicator *row = communicator_add(gate, &made);
    struct liveshift_clock *first = clock_add(gate, row, -1, -1);
    struct liveshift_clock *pair = clock_add(gate, row, 0, 1);
    made.id = 2;
    struct liveshift_clock *apart = clock_add(gate, communicator_add(gate, &made), -1, -1);
    CHECK_SAME(first - liveshift_clocks(gate->page), 0);

    CHECK_SAME(unowned(gate, first->communicator, ME), OWN); /* the only thread that came here */
    atomic_store(&first->owner, OTHER);
    CHECK_SAME(unowned(gate, first->communicator, ME), ANOTHERS);
    CHECK_SAME(unowned(gate, first->communicator, OTHER), OWN);
    CHECK_SAME(unowned(gate, apart->communicator, ME), ANOTHERS); /* it is not alone */
    atomic_store(&first->owner, ME);
    CHECK_SAME(unowned(gate, first->communicator, ME), OWN);
    CHECK_SAME(unowned(gate, apart->communicator, ME), OWN); /* it is */

    /* A program may send and send, from its rank 0 too; who owes nothing waits less for that. */
    struct gate_want want = {.kind = 1, .count = 1};
    first->blocking = pair->blocking = 1;
    want.clock = (uint32_t)(pair - liveshift_clocks(gate->page));
    CHECK_SAME(patience_ms(gate, &want, 1, NONE), GATE_PATIENCE_MS);
    CHECK_SAME(patience_ms(gate, &want, 1, OWN), GATE_PATIENCE_WORKERS_MS);
    want.clock = 0;
    CHECK_SAME(patience_ms(gate, &want, 1, NONE), GATE_PATIENCE_WORKERS_MS);
    first->blocking = 0;
    CHECK_SAME(patience_ms(gate, &want, 1, NONE), GATE_PATIENCE_MS);
    return 0;
}
