/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared-memory page: the interposer's one contract with the rest of liveshift.
 *
 * Every process that calls a collective has one page, the file $LIVESHIFT_PAGES/<pid>, mapped
 * MAP_SHARED. The directory belongs to one capsule, so <pid> is the process's number inside the
 * capsule's pid namespace, which a migration doesn't change. The file appears complete (by rename),
 * at the process's first collective. A forked child gets a page of its own; a program that was
 * exec'ed replaces the page of its predecessor. The file outlives the process: its last state tells
 * how far a dead rank had come.
 *
 * "interposer" below is the process that owns the page, inside a hook; "agent" is the host's agent,
 * which reads the file at any time, without a lock, through liveshift.interposer.page, the Python
 * mirror of this header (tests/test_page_layout.py holds the two equal). The agent never writes.
 * Numbers are little-endian; all places are naturally aligned.
 */
#ifndef LIVESHIFT_INTERPOSER_PAGE_H
#define LIVESHIFT_INTERPOSER_PAGE_H

#include <stdatomic.h>
#include <stdint.h>

#define LIVESHIFT_PAGE_MAGIC "LIVESHFT"
#define LIVESHIFT_PAGE_SIZE 4096

/*
 * Increase by one whenever a reader of the number before would misread a page: a field moves,
 * changes size or meaning, or part of `reserved` is given one. A new kind of collective needs no
 * increase, because each counter carries its name. A running job keeps the library it began with,
 * so after an upgrade the agent meets pages with the old number; it must refuse them by name, not
 * guess.
 */
#define LIVESHIFT_PAGE_LAYOUT 1

#define LIVESHIFT_PAGE_COUNTERS 64

struct liveshift_counter {
    /* Name of the collective, NUL-padded, e.g. "gloo.allreduce".
       Written once by the interposer when it makes the page, read by the agent. */
    char kind[24];
    /* Calls begun. Written by the interposer before each call, read by the agent. */
    _Atomic uint64_t started;
    /* Calls that came back, by return or by exception. Written by the interposer after each call,
       read by the agent; started - finished of them are in flight. */
    _Atomic uint64_t finished;
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
    /* RANK, WORLD_SIZE and LOCAL_RANK from the environment at the first collective, -1 where unset
       or not a number. Read by the agent to name the rank. */
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

    /* When the last collective began and when the last one came back; clock as for created_ns, 0
       before the first. Written by the interposer around each call (with several threads: by
       whichever stored last), read by the agent to tell a slow rank from a stuck one. */
    _Atomic uint64_t last_started_ns;
    _Atomic uint64_t last_finished_ns;

    /* Counters of collectives, the first `kinds` in use. */
    struct liveshift_counter counters[LIVESHIFT_PAGE_COUNTERS];

    /* Zero. Room for the gate (its state, the clock's targets), written by the agent and read by
       the interposer; using it is a new layout. */
    uint8_t reserved[1392];
};

_Static_assert(sizeof(struct liveshift_counter) == 40, "the counter's size is part of the layout");
_Static_assert(sizeof(struct liveshift_page) == LIVESHIFT_PAGE_SIZE, "a page is a page");

#endif
