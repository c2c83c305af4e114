/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared-memory page: the only contract between the interposer and the rest of liveshift.
 *
 * Every process that calls a collective, makes a communicator or allocates device memory has a
 * page: the file $LIVESHIFT_PAGES/<pid>, mapped MAP_SHARED. The directory belongs to one capsule.
 * <pid> is the process's pid in the capsule's pid namespace, which a migration does not change. The
 * file moves with the capsule. A rename makes the file appear when it is complete. A forked child
 * gets its own page. A program that was exec'ed replaces the page of the program before it. The
 * file stays after the process, so it shows how far a dead rank had come.
 *
 * "interposer" below is the process that owns the page, inside a hook or its service thread.
 * "agent" is the host's agent, through liveshift.interposer: `layout` is the Python mirror of this
 * header (tests/interposer/test_page_layout.py holds the two equal), `page` reads and `orders`
 * writes. Numbers are little-endian, and all fields are naturally aligned. Each field has one
 * writer, and no field is a lock, so either side may die at any moment.
 *
 * The agent reads and writes the file by pread and pwrite, because the job's user can truncate the
 * file, and an access to a mapping would then kill the agent. A reader may see only a part of a
 * write of several fields; `order.check` shows whether an order is whole.
 *
 * The tables lie at fixed offsets. The interposer reserves a table's storage before it uses a row:
 * on a full tmpfs the reservation gives an error, and an access to the mapping would be a SIGBUS.
 * The last table, the allocations, makes the file grow. The mapping has the file's largest size.
 */
#ifndef LIVESHIFT_INTERPOSER_PAGE_H
#define LIVESHIFT_INTERPOSER_PAGE_H

#include <stdatomic.h>
#include <stdint.h>

#define LIVESHIFT_PAGE_MAGIC "LIVESHFT"

/*
 * Increase it by one if a reader of the number before would misread a page, because a field moves
 * or changes its size or meaning. A new kind of collective, allocation or communicator needs no
 * increase. A running job keeps the library with which it began. So after an upgrade the agent
 * finds pages with the old number, and must refuse them with a message that names the number.
 */
#define LIVESHIFT_PAGE_LAYOUT 2

#define LIVESHIFT_PAGE_COUNTERS 64
#define LIVESHIFT_PAGE_THREADS 64
#define LIVESHIFT_PAGE_MISSING_CLOCKS 128
#define LIVESHIFT_PAGE_CLOCKS 4096
#define LIVESHIFT_PAGE_COMMUNICATORS 512
#define LIVESHIFT_PAGE_STREAMS 1024
#define LIVESHIFT_PAGE_ALLOCATIONS 65536

/* What the agent orders. Every order but OPEN closes the gate. The agent gives each order only
   after the one above it, with these exceptions: OPEN may follow every order; TARGET follows CLOSED
   if a rank had begun more than the agent knew; TEARDOWN follows REBUILD if the rebuild failed. The
   service thread carries out the last four. Only processes with NCCL communicators or device memory
   have one. */
enum liveshift_want {
    LIVESHIFT_OPEN = 0,     /* operations pass */
    LIVESHIFT_ARMED = 1,    /* new operations wait for targets */
    LIVESHIFT_TARGET = 2,   /* operations up to the clocks' targets pass, see gate.h */
    LIVESHIFT_CLOSED = 3,   /* nothing passes; the streams that carried communication are drained */
    LIVESHIFT_TEARDOWN = 4, /* communicators are finalized and destroyed; their handles stay */
    LIVESHIFT_FRESH_IDS =
        5,                 /* rank 0 of each communicator that is down makes a new `fresh_id`, which
                                contains the process's present address */
    LIVESHIFT_REBUILD = 6, /* communicators are made again from `rebuild_id`, in `rebuild_order` */
    LIVESHIFT_DEVICES = 7, /* a device session is served, see device_session.h. After CLOSED or any
                              later one, again and again, each with a version of its own; nothing
                              else changes by it. */
};

/* The agent writes all fields, `check` last; the interposer reads them. */
struct liveshift_order {
    /* enum liveshift_want. The fast path reads only this field. */
    _Atomic uint32_t want;
    /* The number of the attempt to quiesce. Each attempt has another one. It is never 0 while the
       gate is closed. */
    _Atomic uint32_t attempt;
    /* The version of the targets within the attempt. It grows. */
    _Atomic uint32_t version;
    /* A number that the agent changes again and again. If a waiting thread sees it unchanged for
       lease_ms, in which the thread was awake, the thread opens the gate. It does not do so while
       communicators are down. */
    _Atomic uint32_t heartbeat;
    /* Milliseconds. 0: no thread opens the gate by itself. */
    _Atomic uint32_t lease_ms;
    /* The milliseconds that each of draining, teardown and rebuild may take. */
    _Atomic uint32_t limit_ms;
    /* ~(want * 0x01000193 ^ attempt * 0x9e3779b1 ^ version). It shows that the three numbers belong
       together. The agent writes it last, and wakes the threads that wait on it for another order:
       it is their futex. */
    _Atomic uint32_t check;
    /* How many rows of `missing_clocks` are in use. The agent writes it before the order. */
    _Atomic uint32_t missing_count;
};

/*
 * The target of a clock that this process does not have yet. A pair's clock is made with the pair's
 * first operation, which the other end of the pair has begun already. The agent writes the rows
 * before the order.
 */
struct liveshift_missing_clock {
    /* The id of the clock. */
    _Atomic uint64_t id;
    _Atomic uint64_t target;
    /* The row of the clock's communicator. */
    _Atomic uint32_t communicator;
    uint32_t unused;
};

/* The interposer writes these fields; the agent reads them. */
struct liveshift_answer {
    /* The attempt that this process has ended by itself, because its agent sent no heartbeat. */
    _Atomic uint32_t reopened;
    /* Grows whenever a thread passes beyond a target, or a clock appears, while the gate is closed.
       If it is equal before and after a reader reads the clocks, they are of one moment. */
    _Atomic uint32_t changes;
    /* The number of groups under way (ncclGroupStart to the outermost ncclGroupEnd) that were begun
       with the gate open. Their members are announced one by one, so the clocks are exact only when
       this is 0. */
    _Atomic uint32_t groups;
    /* The number of communications in flight that no clock counts, such as making a communicator.
       While it is not 0, there is no boundary. */
    _Atomic uint32_t untracked;
    /* The number of communications that came back on communicators without an agreed identity.
       While it grows, no boundary holds for all ranks. */
    _Atomic uint64_t unidentified;
    /* The last order that the service thread has carried out, and the result: 0 or an errno value.
       The agent waits until these are its own attempt, version and want. The interposer writes
       `done_want` last; it is 0 while an order is being carried out. EOPNOTSUPP after CLOSED means
       that something in this process can't be torn down. */
    _Atomic uint32_t done_attempt;
    _Atomic uint32_t done_version;
    _Atomic uint32_t done_result;
    _Atomic uint32_t done_want;
    /* 1 from the moment a teardown begins until the rebuild is complete. */
    _Atomic uint32_t down;
    uint32_t unused;
    /* How long the last draining, teardown and rebuild took, in nanoseconds. */
    _Atomic uint64_t drained_ns, torn_down_ns, rebuilt_ns;
    /* A text, NUL-padded: why done_result is not 0, or a remark if it is 0. It is written before
       done_result. */
    char message[160];
};

struct liveshift_counter {
    /* The operation's name, NUL-padded, such as "gloo.allreduce" or "nccl.AllReduce". The
       interposer writes it once, when it makes the page. */
    char kind[24];
    /* The number of calls that have begun. The interposer counts before each call. */
    _Atomic uint64_t started;
};

/* A thread inside the gate. Each row is written by its thread. From the rows the agent knows where
   a rank's threads are. */
struct liveshift_thread {
    /* gettid() in the capsule. 0: the row is free. */
    _Atomic int32_t tid;
    /* 'A' the gate is armed, no targets yet; 'P' parked: nothing is pending in this process; 'O'
       waiting for the thread that owns a pending operation; 'C' the gate is closed. */
    _Atomic uint32_t state;
    /* The row of the first clock of which the thread wants a number, and how many wants it has. */
    _Atomic uint32_t clock;
    _Atomic uint32_t wants;
    /* The index of the operation in `counters`. */
    _Atomic uint32_t kind;
    uint32_t unused;
};

/*
 * The clock of one key: of a communicator's collectives, or of one directed pair of its ranks. It
 * takes one cache line. Rows [0, page.clocks) have been used. A row with the id 0 is free. The
 * interposer writes all fields except `target`.
 */
struct liveshift_clock {
    /* The same number on every member: a hash of the communicator's identity and the pair.
       Different keys have different numbers. 0: the row is free. It is written before `clocks`
       grows. */
    _Atomic uint64_t id;
    /* The number of operations that have begun, including those that wait at the gate. */
    _Atomic uint64_t announced;
    /* The number of operations whose real call came back, by return or by exception. */
    _Atomic uint64_t returned;
    /* The number beyond `target` up to which a thread has passed that owned a pending operation. It
       is written only while the gate is closed. */
    _Atomic uint64_t raised;
    /* Operations up to this number pass under LIVESHIFT_TARGET. The agent writes it before the
       order. A clock that is made while the gate is closed begins with its target in
       `missing_clocks`. */
    _Atomic uint64_t target;
    /* The row of the communicator. This field and the next line are written once. */
    uint32_t communicator;
    /* Sender and receiver as ranks within the communicator; both are -1 for collectives. */
    int32_t from, to;
    /* The thread that took the last number. */
    _Atomic int32_t owner;
    /* The index of the last operation in `counters`. */
    _Atomic uint32_t kind;
    /* 1: a call returns only when its peers have come (gloo). 0: a call enqueues (NCCL). Written
       once. */
    uint32_t blocking;
};

enum liveshift_library { LIVESHIFT_GLOO = 1, LIVESHIFT_NCCL = 2 };

enum liveshift_communicator_state {
    LIVESHIFT_COMM_FREE = 0,
    LIVESHIFT_COMM_LIVE = 1,
    LIVESHIFT_COMM_DOWN = 2, /* torn down beneath the application, to be rebuilt */
    LIVESHIFT_COMM_ENDED = 3 /* finalized, destroyed or aborted by the application */
};

/* Rows [0, page.communicators) have been used. If a field's comment says nothing else, the
   interposer writes the field when the communicator is made, and the agent reads it. */
struct liveshift_communicator {
    /* enum liveshift_communicator_state. It is the last field that is written of a new row. */
    _Atomic uint32_t state;
    /* enum liveshift_library. */
    uint32_t library;
    /* The identity on which all members agree. Different communicators have different ones. 0: the
       members agreed on none. */
    uint64_t id;
    /* The id of the communicator from which this one was split, shrunk or grown. 0: none. */
    uint64_t parent;
    int32_t size, rank;
    /* The CUDA device. -1: none. */
    int32_t device;
    /* 'I' init, 'A' initAll, 'S' scalable, 's' split, 'k' shrink, 'g' grow, 'G' gloo full mesh. */
    uint32_t made_by;
    /* The number of this communicator among those of the process, from 1. */
    uint32_t ordinal;
    /* How often it has been rebuilt. The interposer counts. */
    _Atomic uint32_t generation;
    /* commName, or the group's name, for display; NUL-padded. */
    char name[64];
    /* A text, NUL-padded: why the communicator can't be torn down. Empty: no reason is known. The
       interposer writes it when it learns a reason. */
    char unsafe[128];
    /* A fresh ncclUniqueId for the attempt `fresh_attempt`. The interposer makes it if `rank` is
       0. */
    uint8_t fresh_id[128];
    /* The unique id for the rebuild, and the communicator's place in the global order, from 1. With
       place 0 it is not rebuilt, because a member is missing; then operations on it fail, and it
       can still be destroyed. The agent writes both before the order LIVESHIFT_REBUILD. */
    uint8_t rebuild_id[128];
    _Atomic uint32_t fresh_attempt;
    _Atomic uint32_t rebuild_order;
    /* The number of all operations that have been launched on it. The interposer counts. */
    _Atomic uint64_t operations;
};

/* A stream of this process. The interposer writes the row; the agent reads it. Rows
   [0, page.streams) have been used. */
struct liveshift_stream {
    /* The handle. 0: the row is free. UINT64_MAX: the stream is being destroyed. */
    _Atomic uint64_t handle;
    int32_t device;
    uint32_t flags;
    int32_t priority;
    /* Bits. 1: communication was enqueued here since the last drain. 2: the stream is being
       captured into a graph. */
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
    LIVESHIFT_MEMORY_EXPORTED = 11,  /* IPC or shareable handle of ours, exported */
    LIVESHIFT_MEMORY_NCCL = 12,      /* ncclMemAlloc */
    LIVESHIFT_MEMORY_MULTICAST = 13, /* cuMulticastCreate: address is the handle */
    LIVESHIFT_MEMORY_EVENT = 14,     /* IPC handle of an event, made or opened here: no memory */
    LIVESHIFT_MEMORY_ARENA = 15,     /* cudaMalloc on memory that can be taken away, see arena.h */
};

/* One allocation. The interposer writes the row, `kind` last, and clears `kind` first; the agent
   reads it. The rows have no order: the interposer finds them by its own index. */
struct liveshift_allocation {
    _Atomic uint64_t address;
    _Atomic uint64_t size;
    /* The handle of the physical memory, for a mapped range, and for a shareable handle that was
       imported or exported. Otherwise 0, also for IPC handles. */
    _Atomic uint64_t handle;
    /* The stream on which it was allocated. 0: none. */
    _Atomic uint64_t stream;
    /* enum liveshift_memory. */
    _Atomic uint32_t kind;
    _Atomic int32_t device;
    /* The flags of the call that made it. */
    _Atomic uint64_t flags;
    /* The number of this allocation among all of the process. */
    _Atomic uint64_t serial;
    uint64_t unused;
};

/* Totals that the ledger keeps besides the rows. The interposer writes them. */
struct liveshift_ledger {
    /* The numbers of allocations and frees so far, and of allocations and streams that found no
       free row. If `missed` is not 0, the rows are incomplete. */
    _Atomic uint64_t made, freed, missed;
    /* The numbers of events, graphs and graph executables that exist, and of graphs with captured
       NCCL operations. */
    _Atomic uint64_t events, graphs, graph_execs, graphs_with_nccl;
    /* The driver's version as CUDA's number, such as 13000. 0: no driver is loaded. */
    _Atomic uint32_t driver;
    /* How many rows of the table have been used. */
    _Atomic uint32_t rows;
};

struct liveshift_page {
    /* The interposer writes the fields down to `command` once, before the file gets its name. */

    /* LIVESHIFT_PAGE_MAGIC without its NUL. The agent reads it first. */
    char magic[8];
    /* LIVESHIFT_PAGE_LAYOUT. The agent reads it second, because all other fields depend on it. */
    uint32_t layout;
    /* How many of `counters` are in use. */
    uint32_t kinds;
    /* getpid() of the owner in its own pid namespace, like the file's name. */
    int32_t pid;
    /* RANK, WORLD_SIZE and LOCAL_RANK from the environment. -1: it is not set, or not a number. The
       agent names the rank by them. */
    int32_t rank;
    int32_t world_size;
    int32_t local_rank;
    /* When the page was made: CLOCK_MONOTONIC in ns, in the owner's time namespace. In a capsule
       this clock differs from the host's by an offset, and does not jump at a migration. Another
       value under the same pid means another program, whose counters began at 0. */
    uint64_t created_ns;
    /* The version of liveshift from which the library was built, NUL-padded. */
    char version[24];
    /* The short name by which the program was called, such as "python"; NUL-padded. */
    char command[64];

    struct liveshift_order order;
    struct liveshift_answer answer;
    struct liveshift_ledger ledger;

    /* How many rows of the tables have been used. The interposer writes these fields. */
    _Atomic uint32_t clocks;
    _Atomic uint32_t communicators;
    _Atomic uint32_t streams;
    uint32_t unused;
    /* The number of operations that came back on clocks whose rows were freed since. So the sum of
       `returned` over all rows and of this never shrinks. The interposer writes it. */
    _Atomic uint64_t retired;

    struct liveshift_thread threads[LIVESHIFT_PAGE_THREADS];
    struct liveshift_counter counters[LIVESHIFT_PAGE_COUNTERS];
    struct liveshift_missing_clock missing_clocks[LIVESHIFT_PAGE_MISSING_CLOCKS];
};

/* The offsets of the tables in the file, in bytes. */
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
