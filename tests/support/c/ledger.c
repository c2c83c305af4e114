/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads allocate, free, map and export memory in the ways of CUDA, and another thread may get an
 * address as soon as it is free. Meanwhile the process forks. In the end every row is free again,
 * no child has begun with rows of its parent, and allocations without a row are counted.
 * needs: gate/gate.c gate/clocks.c gate/process.c ledger/ledger.c ledger/ledger_rows.c ledger/streams.c ledger/graphs.c
 */
#include "check.h"
#include "cuda/cuda_real.h"
#include "gate/process.h"
#include "ledger/graphs.h"
#include "ledger/ledger_rows.h"
#include "ledger/streams.h"
#include "nccl/vcomm.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORKERS 4
#define ADDRESSES 64 /* fewer than the threads want */
#define OPENED 0x7000000
#define HANDLE 0x9000

/* Stand-ins for the functions of CUDA that these files call. */
uint32_t driver_version(void) { return 13000; }
uint64_t capture_number(uint64_t stream) { return stream % 5 == 0 ? stream : 0; }

/* Stand-ins for the NCCL adapter. */
void vcomms_forked(void) {}
void vcomms_clear_fast_stream(void) {}

static atomic_bool taken[ADDRESSES]; /* the allocator: whether an address is in use */
static unsigned long rounds;
static _Atomic uint64_t exported, made;
static atomic_int working = WORKERS;
static atomic_bool forking = true;

static struct ledger_record at_address(enum liveshift_memory kind, uint64_t address) {
    return (struct ledger_record){kind, 0, address, 512, 0, 0, 0};
}

/* Returns a free address's index, or -1. */
static int acquire(unsigned *seed) {
    for (int tries = 0; tries < 8; tries++) {
        int at = (int)below(seed, ADDRESSES);
        if (!atomic_exchange(&taken[at], true))
            return at;
    }
    return -1;
}

static void memory(unsigned *seed) {
    int at = acquire(seed);
    if (at < 0)
        return;
    uint64_t address = 0x100000 + 512 * (uint64_t)at;
    struct ledger_record wanted = at_address(LIVESHIFT_MEMORY_DEVICE, address), found;
    ledger_add(LEDGER_POINTER, &wanted);
    atomic_fetch_add(&made, 1);
    CHECK(ledger_find(LEDGER_POINTER, address, &found));
    CHECK_SAME(found.address, address);
    if (below(seed, 4) == 0) {
        ledger_exported(LEDGER_POINTER, address, 0);
        ledger_exported(LEDGER_POINTER, address, 0);
        atomic_fetch_add(&exported, 1);
    }
    if (below(seed, 4) == 0) { /* a free that fails */
        struct ledger_free leaving = ledger_free_begin(LEDGER_POINTER, address);
        CHECK(leaving.row != 0 && leaving.last);
        ledger_free_end(leaving, false);
    }
    struct ledger_free leaving = ledger_free_begin(LEDGER_POINTER, address);
    CHECK(leaving.row != 0 && leaving.last);
    atomic_store(&taken[at], false); /* CUDA has freed it, but its call has not returned */
    if (below(seed, 2) == 0)
        sched_yield();
    ledger_free_end(leaving, true);
}

/* All threads open the same handle, and each closes it as often as it has opened it. */
static void open_and_close(unsigned *seed) {
    struct ledger_record wanted = at_address(LIVESHIFT_MEMORY_IMPORTED, OPENED);
    unsigned times = 1 + below(seed, 3);
    for (unsigned i = 0; i < times; i++)
        ledger_add(LEDGER_OPENED, &wanted);
    atomic_fetch_add(&made, times);
    for (unsigned i = 0; i < times; i++) {
        struct ledger_free leaving = ledger_free_begin(LEDGER_OPENED, OPENED);
        CHECK(leaving.row != 0);
        ledger_free_end(leaving, true);
    }
}

/* Maps physical memory twice, and releases it before or after it unmaps it. */
static void map(unsigned *seed, unsigned which) {
    uint64_t handle = HANDLE + which, address = 0x40000000 + ((uint64_t)which << 24);
    struct ledger_record wanted = at_address(LIVESHIFT_MEMORY_PHYSICAL, handle);
    bool early = below(seed, 2) == 0;
    ledger_add(LEDGER_HANDLE, &wanted);
    ledger_mapped(address, 512, handle, 0);
    ledger_mapped(address + 512, 512, handle, 0);
    ledger_retained(handle);
    atomic_fetch_add(&made, 3);
    ledger_free_end(ledger_free_begin(LEDGER_HANDLE, handle), true);
    if (early)
        ledger_free_end(ledger_free_begin(LEDGER_HANDLE, handle), true);
    ledger_unmapped(address, 1024);
    if (!early)
        ledger_free_end(ledger_free_begin(LEDGER_HANDLE, handle), true);
    CHECK(!ledger_find(LEDGER_HANDLE, handle, NULL));
    CHECK(!ledger_find(LEDGER_MAPPED, address, NULL));
}

/* Uses streams and graphs, whose handles are used again, too. */
static void work(unsigned *seed, unsigned which) {
    uint64_t stream = 0x5000 + 5 * which, graph = 0x6000 + 16 * which;
    stream_created(stream, 1, 1, -1);
    CHECK_SAME(stream_device(stream, 0), 1);
    CHECK(stream_row(STREAM_LEGACY, 0) != NULL);
    capture_begun(stream, 1, false);
    ledger_capture_has_nccl(stream);
    capture_ended(stream, 1, capture_number(stream), 0); /* CUDA refused: the capture goes on */
    capture_ended(stream, 1, below(seed, 2) == 0 ? 7 : 0, graph);
    graph_copied(graph, graph + 1, true);
    CHECK(!graph_destroy_begin(graph + 1, true));
    CHECK(!graph_destroy_begin(graph, false));
    stream_destroy_end(stream_destroy_begin(stream), stream, true);
}

static void *busy(void *argument) {
    unsigned which = (unsigned)(unsigned long)argument, seed = which;
    for (unsigned long round = 0; round < rounds; round++)
        switch (below(&seed, 8)) {
        case 0:
            open_and_close(&seed);
            break;
        case 1:
            map(&seed, which);
            break;
        case 2:
            work(&seed, which);
            break;
        default:
            memory(&seed);
        }
    atomic_fetch_sub(&working, 1);
    while (atomic_load(&forking)) /* ThreadSanitizer does not check such a child */
        sched_yield();
    return NULL;
}

static struct liveshift_ledger *totals(void) { return &current_gate()->page->ledger; }

static void all_is_free(uint64_t all) {
    struct ledger_record found;
    for (uint32_t row = 0; row_read(row, &found); row++)
        CHECK_SAME(found.kind, LIVESHIFT_MEMORY_FREE);
    CHECK_SAME(atomic_load(&totals()->made), all);
    CHECK_SAME(atomic_load(&totals()->freed), all - atomic_load(&totals()->missed));
    for (uint32_t at = 0; at < atomic_load(&current_gate()->page->streams); at++) {
        uint64_t handle = atomic_load(&liveshift_streams(current_gate()->page)[at].handle);
        CHECK(handle == 0 || handle == STREAM_LEGACY);
    }
    CHECK_SAME(atomic_load(&totals()->graphs), 0);
    CHECK_SAME(atomic_load(&totals()->graph_execs), 0);
}

static void in_child(void) {
    struct ledger_record wanted = at_address(LIVESHIFT_MEMORY_DEVICE, 0x100000);
    unsigned seed = 1;
    CHECK(!ledger_find(LEDGER_POINTER, wanted.address, NULL));
    CHECK_SAME(atomic_load(&totals()->rows), 0);
    ledger_add(LEDGER_POINTER, &wanted);
    CHECK(ledger_find(LEDGER_POINTER, wanted.address, NULL));
    ledger_free_end(ledger_free_begin(LEDGER_POINTER, wanted.address), true);
    work(&seed, 1);
    all_is_free(1);
    CHECK_SAME(atomic_load(&totals()->rows), 1);
    _exit(0);
}

static void more_than_there_is_room_for(uint64_t before) {
    enum { MORE = LIVESHIFT_PAGE_ALLOCATIONS + 10 };
    for (uint64_t i = 0; i < MORE; i++) {
        struct ledger_record wanted = at_address(LIVESHIFT_MEMORY_DEVICE, 0x100000000 + 512 * i);
        ledger_add(LEDGER_POINTER, &wanted);
    }
    CHECK_SAME(atomic_load(&totals()->missed), 10);
    struct ledger_record found;
    for (uint32_t row = 0; row_read(row, &found); row++)
        CHECK_SAME(found.kind, LIVESHIFT_MEMORY_DEVICE);
    CHECK_SAME(atomic_load(&totals()->rows), LIVESHIFT_PAGE_ALLOCATIONS);
    for (uint64_t i = 0; i < MORE; i++)
        ledger_free_end(ledger_free_begin(LEDGER_POINTER, 0x100000000 + 512 * i), true);
    all_is_free(before + MORE);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    setenv("LIVESHIFT_PAGES", argv[2], 1);
    rounds = 500 * strtoul(argv[1], NULL, 10);
    pthread_t threads[WORKERS];
    for (unsigned long i = 0; i < WORKERS; i++)
        CHECK(pthread_create(&threads[i], NULL, busy, (void *)(i + 1)) == 0);
    for (int forks = 0; forks < 20 && atomic_load(&working) > 0; forks++) {
        pid_t child = fork();
        int status = 1;
        if (child == 0)
            in_child();
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    atomic_store(&forking, false);
    for (int i = 0; i < WORKERS; i++)
        pthread_join(threads[i], NULL);
    uint64_t all = atomic_load(&made) + atomic_load(&exported);
    all_is_free(all);
    CHECK(atomic_load(&totals()->rows) <= ADDRESSES * 2 + WORKERS * 16);
    /* The message on stderr is expected here, and must not make the test fail. */
    CHECK(freopen("/dev/null", "w", stderr) != NULL);
    more_than_there_is_room_for(all);
    return 0;
}
