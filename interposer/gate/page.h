/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared-memory page: the interposer's one contract with the rest of liveshift.
 *
 * Every process that calls a collective, makes a communicator or allocates device memory has one,
 * the file $LIVESHIFT_PAGES/<pid>, mapped MAP_SHARED. The directory belongs to one capsule, so
 * <pid> is the process's number inside the capsule's pid namespace, which a migration doesn't
 * change, and the file moves with the capsule. It appears complete (by rename). A forked child gets
 * a page of its own; a program that was exec'ed replaces the page of its predecessor. The file
 * outlives the process: its last state tells how far a dead rank had come.
 *
 * "interposer" below is the process that owns the page, inside a hook or its service thread;
 * "agent" is the host's agent, through liveshift.interposer: `layout` is the Python mirror of this
 * header (tests/interposer/test_page_layout.py holds the two equal), `page` reads, `orders` writes. Numbers
 * are little-endian; all places are naturally aligned. Each field has one writer, and nothing here
 * is a lock, so that either side may die at any moment.
 *
 * The agent reads and writes the file by pread and pwrite: it must not map what the job's user can
 * truncate. A write of several fields may be seen in part; `order.check` says that it is whole.
 *
 * The tables lie at fixed places. A table's storage is reserved before a row of it is used: a full
 * tmpfs is an error there, and would be a SIGBUS in the mapping. The last table, the allocations,
 * grows the file; the mapping is as long as the file can become.
 */
#ifndef LIVESHIFT_INTERPOSER_PAGE_H
#define LIVESHIFT_INTERPOSER_PAGE_H

#include <stdatomic.h>
#include <stdint.h>

#define LIVESHIFT_PAGE_MAGIC "LIVESHFT"

/*
 * Increase by one whenever a reader of the number before would misread a page: a field moves,
 * changes size or meaning. A new kind of collective, allocation or communicator needs no increase.
 * A running job keeps the library it began with, so after an upgrade the agent meets pages with the
 * old number; it must refuse them by name, not guess.
 */
#define LIVESHIFT_PAGE_LAYOUT 2

#define LIVESHIFT_PAGE_COUNTERS 64
#define LIVESHIFT_PAGE_THREADS 64
#define LIVESHIFT_PAGE_ASKS 128
#define LIVESHIFT_PAGE_CLOCKS 4096
#define LIVESHIFT_PAGE_COMMUNICATORS 512
#define LIVESHIFT_PAGE_STREAMS 1024
#define LIVESHIFT_PAGE_ALLOCATIONS 65536

/* What the agent wants; every one but OPEN closes the gate. Only ever written after the one above
   it, or OPEN after any of them; back from CLOSED to TARGET when a rank was further than known, and
   from REBUILD to TEARDOWN when it failed. The last four are done by the service thread, which
   processes have that hold NCCL communicators or device memory. */
enum liveshift_want {
    LIVESHIFT_OPEN = 0,     /* operations pass */
    LIVESHIFT_ARMED = 1,    /* new operations wait for targets */
    LIVESHIFT_TARGET = 2,   /* operations up to the clocks' targets pass, see gate.h */
    LIVESHIFT_CLOSED = 3,   /* nothing passes; the streams that carried communication are drained */
    LIVESHIFT_TEARDOWN = 4, /* communicators are finalized and destroyed; their handles stay */
    LIVESHIFT_FRESH_IDS =
        5,                 /* where a communicator that is down has rank 0: a new `fresh_id`, which
                                holds the address of where the process lives now */
    LIVESHIFT_REBUILD = 6, /* communicators are made again from `rebuild_id`, in `rebuild_order` */
    LIVESHIFT_DEVICES = 7, /* a device session is served, see device_session.h. After CLOSED or any
                              later one, again and again, each with a version of its own; nothing
                              else changes by it. */
};

/* Written by the agent as a whole, `check` last; read by the interposer. */
struct liveshift_order {
    /* enum liveshift_want. What the fast path looks at. */
    _Atomic uint32_t want;
    /* Number of the attempt to quiesce; another for each, never 0 while the gate is closed. */
    _Atomic uint32_t attempt;
    /* Version of the targets within the attempt; grows. */
    _Atomic uint32_t version;
    /* The agent's sign of life: a changing number. Parked threads that see it unchanged for
       lease_ms of their own waking time open the gate themselves, unless communicators are down. */
    _Atomic uint32_t beat;
    /* Milliseconds; 0: never. */
    _Atomic uint32_t lease_ms;
    /* Milliseconds that draining, teardown or rebuild may each take. */
    _Atomic uint32_t limit_ms;
    /* ~(want * 0x01000193 ^ attempt * 0x9e3779b1 ^ version): the three belong together. Written
       last; also the futex on which threads wait for another order, woken by the agent. */
    _Atomic uint32_t check;
    /* How many of `asks` are meant. By the agent, before the order. */
    _Atomic uint32_t asked;
};

/*
 * An operation that was begun at its other end and is owed here, on a clock that this process does
 * not have yet (a pair's is made with its first operation). By the agent, before the order.
 */
struct liveshift_ask {
    /* The clock's. */
    _Atomic uint64_t id;
    _Atomic uint64_t target;
    /* Row of its communicator. */
    _Atomic uint32_t communicator;
    uint32_t unused;
};

/* Written by the interposer, read by the agent. */
struct liveshift_answer {
    /* The attempt that this process has ended by itself because its agent fell silent. */
    _Atomic uint32_t reopened;
    /* Grows whenever a thread passes beyond a target, or a clock appears, while the gate is closed:
       equal before and after reading the clocks, they were read as of one moment. */
    _Atomic uint32_t changes;
    /* Groups (ncclGroupStart to the outermost ncclGroupEnd) that were begun with the gate open.
       Their members are announced one by one, so clocks are exact only when this is 0. */
    _Atomic uint32_t groups;
    /* Communication in flight that no clock counts (making a communicator, say). Not at a boundary
       unless 0. */
    _Atomic uint32_t untracked;
    /* Communications that came back on communicators without an agreed identity: while this
       grows there is no boundary that holds for all ranks. */
    _Atomic uint64_t unidentified;
    /* What the service thread has done last: attempt, version, want, 0 or an errno value. The
       agent waits for its own attempt, version and want here; `done_want` is written last, and 0
       while something is being done. EOPNOTSUPP after CLOSED: something here can't be torn down. */
    _Atomic uint32_t done_attempt;
    _Atomic uint32_t done_version;
    _Atomic uint32_t done_result;
    _Atomic uint32_t done_want;
    /* 1 from the moment a teardown begins until the rebuild is complete. */
    _Atomic uint32_t down;
    uint32_t unused;
    /* How long draining, teardown and rebuild took last; nanoseconds. */
    _Atomic uint64_t drained_ns, torn_down_ns, rebuilt_ns;
    /* Why done_result is not 0, in words, NUL-padded; written before it. With 0, a remark. */
    char trouble[160];
};

struct liveshift_counter {
    /* Name of the operation, NUL-padded, e.g. "gloo.allreduce", "nccl.AllReduce".
       Written once by the interposer when it makes the page, read by the agent. */
    char kind[24];
    /* Calls begun. Written by the interposer before each call, read by the agent. */
    _Atomic uint64_t started;
};

/* A thread inside the gate. Written by the interposer (each row by its thread), read by the agent
   to say where a rank's threads are. */
struct liveshift_thread {
    /* gettid() in the capsule, 0: row free. */
    _Atomic int32_t tid;
    /* 'A' the gate is armed, no targets yet; 'P' parked: nothing is owed here; 'O' waiting for the
       thread that owes an operation; 'C' the gate is closed. */
    _Atomic uint32_t state;
    /* Row of the first clock that it wants a number of; how many numbers, of how many clocks. */
    _Atomic uint32_t clock;
    _Atomic uint32_t wants;
    /* Index into `counters` of the operation. */
    _Atomic uint32_t kind;
    uint32_t unused;
};

/*
 * The clock of one key: a communicator's collectives, or one directed pair of ranks of it. A cache
 * line. Rows [0, page.clocks) have been used; one whose id is 0 is free.
 */
struct liveshift_clock {
    /* The same number on every member (hash of the communicator's identity and the pair), unequal
       for unequal keys; 0: free. Written by the interposer before `clocks` grows. */
    _Atomic uint64_t id;
    /* Operations begun, those that wait at the gate included. By the interposer. */
    _Atomic uint64_t announced;
    /* Operations whose real call came back, by return or by exception. By the interposer. */
    _Atomic uint64_t returned;
    /* The number beyond `target` up to which a thread that owed something else has passed. By the
       interposer, only while the gate is closed. */
    _Atomic uint64_t raised;
    /* Operations up to this number pass in LIVESHIFT_TARGET. By the agent, before the order; a
       clock that is made while the gate is closed begins with what `asks` say. */
    _Atomic uint64_t target;
    /* Row of the communicator. By the interposer, once. */
    uint32_t communicator;
    /* Ranks within the communicator, sender and receiver; -1 and -1 for collectives. Once. */
    int32_t from, to;
    /* Thread that took the last number. By the interposer. */
    _Atomic int32_t owner;
    /* Index into `counters` of the last operation. By the interposer. */
    _Atomic uint32_t kind;
    /* 1: a call returns only when its peers have come (gloo); 0: it enqueues (NCCL). Once. */
    uint32_t blocking;
};

enum liveshift_library { LIVESHIFT_GLOO = 1, LIVESHIFT_NCCL = 2 };

enum liveshift_communicator_state {
    LIVESHIFT_COMM_FREE = 0,
    LIVESHIFT_COMM_LIVE = 1,
    LIVESHIFT_COMM_DOWN = 2, /* torn down beneath the application, to be rebuilt */
    LIVESHIFT_COMM_ENDED = 3 /* finalized, destroyed or aborted by the application */
};

/* Rows [0, page.communicators) have been used. Fields without a remark: by the interposer when the
   communicator is made, read by the agent. */
struct liveshift_communicator {
    /* enum liveshift_communicator_state. By the interposer, the last field of a new row. */
    _Atomic uint32_t state;
    /* enum liveshift_library. */
    uint32_t library;
    /* Agreed by all members and unequal for unequal communicators; 0 where none was agreed. */
    uint64_t id;
    /* Of the communicator this one was split, shrunk or grown from; 0: none. */
    uint64_t parent;
    int32_t size, rank;
    /* CUDA device, -1: none. */
    int32_t device;
    /* 'I' init, 'A' initAll, 'S' scalable, 's' split, 'k' shrink, 'g' grow, 'G' gloo full mesh. */
    uint32_t made_by;
    /* The how many-th communicator of this process; from 1. */
    uint32_t ordinal;
    /* How often it has been rebuilt. By the interposer. */
    _Atomic uint32_t generation;
    /* For people: commName, or the group's name, NUL-padded. */
    char name[64];
    /* Why it can't be torn down, in words, NUL-padded; empty: nothing known. By the interposer. */
    char unsafe[128];
    /* A fresh ncclUniqueId, by the interposer where `rank` is 0, for attempt `fresh_attempt`. */
    uint8_t fresh_id[128];
    /* The one to rebuild with, and when in the global order (from 1; 0: not at all, because a member
       is gone: then operations on it fail, and it can still be destroyed). By the agent, before
       the order LIVESHIFT_REBUILD. */
    uint8_t rebuild_id[128];
    _Atomic uint32_t fresh_attempt;
    _Atomic uint32_t rebuild_order;
    /* Operations that have been launched on it in all. By the interposer. */
    _Atomic uint64_t operations;
};

/* A stream of this process. By the interposer, read by the agent. Rows [0, page.streams). */
struct liveshift_stream {
    /* Handle; 0: free; UINT64_MAX: it is being destroyed. */
    _Atomic uint64_t handle;
    int32_t device;
    uint32_t flags;
    int32_t priority;
    /* 1: communication was enqueued here since the last drain; 2: captured into a graph now. */
    _Atomic uint32_t use;
};

enum liveshift_memory {
    LIVESHIFT_MEMORY_FREE = 0,       /* row free */
    LIVESHIFT_MEMORY_DEVICE = 2,     /* cudaMalloc, cuMemAlloc, pitched ones */
    LIVESHIFT_MEMORY_POOL = 3,       /* cudaMallocAsync, cudaMallocFromPoolAsync */
    LIVESHIFT_MEMORY_MANAGED = 4,    /* cudaMallocManaged */
    LIVESHIFT_MEMORY_PINNED = 5,     /* cudaHostAlloc, cudaMallocHost */
    LIVESHIFT_MEMORY_REGISTERED = 6, /* cudaHostRegister */
    LIVESHIFT_MEMORY_RESERVED = 7,   /* cuMemAddressReserve */
    LIVESHIFT_MEMORY_PHYSICAL = 8,   /* cuMemCreate: address is the handle */
    LIVESHIFT_MEMORY_MAPPED = 9,     /* cuMemMap */
    LIVESHIFT_MEMORY_IMPORTED = 10,  /* IPC or shareable handle of another process, opened here */
    LIVESHIFT_MEMORY_EXPORTED = 11,  /* IPC or shareable handle of ours, given away */
    LIVESHIFT_MEMORY_NCCL = 12,      /* ncclMemAlloc */
    LIVESHIFT_MEMORY_MULTICAST = 13, /* cuMulticastCreate: address is the handle */
    LIVESHIFT_MEMORY_EVENT = 14,     /* IPC handle of an event, made or opened here: no memory */
    LIVESHIFT_MEMORY_ARENA = 15,     /* cudaMalloc on memory that can be taken away, see arena.h */
};

/* One allocation. By the interposer, read by the agent; `kind` is written last and cleared first.
   In no order: the interposer finds rows by an index of its own. */
struct liveshift_allocation {
    _Atomic uint64_t address;
    _Atomic uint64_t size;
    /* Physical handle: of a mapped range, and of a shareable handle that was imported or exported;
       0 otherwise, also for IPC handles. */
    _Atomic uint64_t handle;
    /* Stream it was allocated on; 0 otherwise. */
    _Atomic uint64_t stream;
    /* enum liveshift_memory. */
    _Atomic uint32_t kind;
    _Atomic int32_t device;
    /* Flags of the call that made it. */
    _Atomic uint64_t flags;
    /* The how many-th allocation of the process. */
    _Atomic uint64_t serial;
    uint64_t unused;
};

/* Totals that the ledger keeps besides the rows. By the interposer, read by the agent. */
struct liveshift_ledger {
    /* Allocations and frees so far; allocations and streams that found no free row (then rows are
       not all). */
    _Atomic uint64_t made, freed, missed;
    /* Live events, graphs and graph executables; graphs with NCCL operations captured in them. */
    _Atomic uint64_t events, graphs, graph_execs, graphs_with_nccl;
    /* Driver version (CUDA's number, 13000), 0: the driver was not loaded. */
    _Atomic uint32_t driver;
    /* Rows of the table that have been used. */
    _Atomic uint32_t rows;
};

struct liveshift_page {
    /* Fields down to `command` are written once by the interposer, before the file has its name. */

    /* LIVESHIFT_PAGE_MAGIC without its NUL. Read by the agent first. */
    char magic[8];
    /* LIVESHIFT_PAGE_LAYOUT. Read by the agent second; all that follows depends on it. */
    uint32_t layout;
    /* How many of `counters` are in use. Read by the agent. */
    uint32_t kinds;
    /* getpid() of the owner in its own pid namespace, like the file's name. Read by the agent. */
    int32_t pid;
    /* RANK, WORLD_SIZE and LOCAL_RANK from the environment, -1 where unset or not a number. Read by
       the agent to name the rank. */
    int32_t rank;
    int32_t world_size;
    int32_t local_rank;
    /* When the page was made; CLOCK_MONOTONIC, ns, of the owner's time namespace (in a capsule it
       differs from the host's by an offset but doesn't jump over a migration). Read by the agent:
       a changed value under the same pid is another program, whose counters began at 0. */
    uint64_t created_ns;
    /* Version of liveshift that the library was built from, NUL-padded. Read by the agent. */
    char version[24];
    /* Short name by which the program was called, NUL-padded ("python"). Read by the agent. */
    char command[64];

    struct liveshift_order order;
    struct liveshift_answer answer;
    struct liveshift_ledger ledger;

    /* Rows of the tables that have been used. By the interposer, read by the agent. */
    _Atomic uint32_t clocks;
    _Atomic uint32_t communicators;
    _Atomic uint32_t streams;
    uint32_t unused;
    /* Operations that came back on clocks whose rows were freed since: the sum of `returned` over
       all rows plus this never shrinks. By the interposer, read by the agent. */
    _Atomic uint64_t retired;

    struct liveshift_thread threads[LIVESHIFT_PAGE_THREADS];
    struct liveshift_counter counters[LIVESHIFT_PAGE_COUNTERS];
    struct liveshift_ask asks[LIVESHIFT_PAGE_ASKS];
};

/* Where the tables lie in the file, in bytes. */
#define LIVESHIFT_HEADER_SIZE 8192
#define LIVESHIFT_CLOCKS_AT LIVESHIFT_HEADER_SIZE
#define LIVESHIFT_COMMUNICATORS_AT (LIVESHIFT_CLOCKS_AT + LIVESHIFT_PAGE_CLOCKS * 64)
#define LIVESHIFT_STREAMS_AT (LIVESHIFT_COMMUNICATORS_AT + LIVESHIFT_PAGE_COMMUNICATORS * 512)
#define LIVESHIFT_ALLOCATIONS_AT (LIVESHIFT_STREAMS_AT + LIVESHIFT_PAGE_STREAMS * 24)
#define LIVESHIFT_PAGE_SIZE (LIVESHIFT_ALLOCATIONS_AT + LIVESHIFT_PAGE_ALLOCATIONS * 64)

_Static_assert(sizeof(struct liveshift_page) <= LIVESHIFT_HEADER_SIZE, "the header has its place");
_Static_assert(sizeof(struct liveshift_clock) == 64, "the clock's size is part of the layout");
_Static_assert(sizeof(struct liveshift_communicator) == 512, "a communicator's size likewise");
_Static_assert(sizeof(struct liveshift_stream) == 24, "a stream's size likewise");
_Static_assert(sizeof(struct liveshift_allocation) == 64, "an allocation's size likewise");

static inline struct liveshift_clock *liveshift_clocks(struct liveshift_page *page) {
    return (struct liveshift_clock *)((char *)page + LIVESHIFT_CLOCKS_AT);
}

static inline struct liveshift_communicator *liveshift_communicators(struct liveshift_page *page) {
    return (struct liveshift_communicator *)((char *)page + LIVESHIFT_COMMUNICATORS_AT);
}

static inline struct liveshift_stream *liveshift_streams(struct liveshift_page *page) {
    return (struct liveshift_stream *)((char *)page + LIVESHIFT_STREAMS_AT);
}

static inline struct liveshift_allocation *liveshift_allocations(struct liveshift_page *page) {
    return (struct liveshift_allocation *)((char *)page + LIVESHIFT_ALLOCATIONS_AT);
}

#endif
