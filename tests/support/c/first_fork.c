/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process forks while another thread of it uses the page, a communicator and the ledger for the
 * first time. The child inherits part of that state. It must begin empty and must find no lock
 * held.
 * needs: gate/gate.c gate/clocks.c gate/process.c ledger/ledger.c ledger/ledger_rows.c ledger/streams.c ledger/graphs.c
 */
#include "check.h"
#include "cuda/cuda_real.h"
#include "gate/clocks.h"
#include "gate/process.h"
#include "ledger/ledger.h"
#include "nccl/vcomm.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

uint32_t driver_version(void) { return 13000; }
uint64_t capture_number(uint64_t stream) { return 0 * stream; }

/* Stand-ins for the NCCL adapter. */
void vcomms_forked(void) {}
void vcomms_clear_fast_stream(void) {}

static atomic_int at_once;
static atomic_bool forked;

static void use(void) {
    struct ledger_record memory = {LIVESHIFT_MEMORY_DEVICE, 0, 0x1000, 512, 0, 0, 0};
    struct communicator_info made = {.library = LIVESHIFT_NCCL, .id = 7, .size = 2, .rank = 0};
    struct liveshift_communicator *row = communicator_add(current_gate(), &made);
    struct liveshift_clock *clock = clock_add(current_gate(), row, -1, -1);
    ledger_add(LEDGER_POINTER, &memory);
    gate_begin(current_gate(), clock, 0, current_tid());
    gate_end(clock);
}

static void together(void) {
    atomic_fetch_add(&at_once, 1);
    while (atomic_load(&at_once) < 2)
        sched_yield();
}

static void *other(void *argument) {
    together();
    use();
    /* ThreadSanitizer does not check a child whose parent has other threads at the fork. It does
       check one whose parent had threads only before. */
    while (!atomic_load(&forked))
        sched_yield();
    return argument;
}

static void begins_with_nothing(void) {
    struct liveshift_page *page = current_gate()->page;
    CHECK_SAME(page->pid, getpid());
    CHECK_SAME(atomic_load(&page->communicators), 0);
    CHECK_SAME(atomic_load(&page->ledger.rows), 0);
    CHECK(!ledger_find(LEDGER_POINTER, 0x1000, NULL));
    use();
    CHECK_SAME(atomic_load(&page->communicators), 1);
    CHECK_SAME(atomic_load(&page->counters[0].started), 1);
    CHECK_SAME(atomic_load(&page->ledger.made), 1);
    _exit(0);
}

static void ended_well(pid_t child) {
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

/* Runs in a new process, which has used nothing yet. */
static void first_use(unsigned delay) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other, NULL) == 0);
    together();
    for (volatile unsigned i = 0; i < delay; i++)
        ;
    pid_t child = fork();
    if (child == 0)
        begins_with_nothing();
    atomic_store(&forked, true);
    ended_well(child);
    pthread_join(thread, NULL);
    CHECK_SAME(atomic_load(&current_gate()->page->ledger.made), 1);
    _exit(0);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    setenv("LIVESHIFT_PAGES", argv[2], 1);
    unsigned seed = 1;
    for (int round = 0, rounds = 3 * atoi(argv[1]); round < rounds; round++) {
        unsigned delay = below(&seed, 100000);
        pid_t child = fork();
        if (child == 0)
            first_use(delay);
        ended_well(child);
    }
    return 0;
}
