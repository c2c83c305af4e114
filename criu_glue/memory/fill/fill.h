// SPDX-License-Identifier: Apache-2.0
//
// Fills the memory of a tree that CRIU restores with --lazy-pages, in the place of CRIU's own
// lazy-pages daemon: CRIU hands over a userfaultfd per process, with every VMA registered that is
// not in its images, and threads copy the store's pages in.
//
// The kernel tells the one thread that reads a descriptor of faults, and of forks and changes of
// the address space, and holds the process until that was read. The tree runs only after all of its
// pages are in place, so a process that forks or changes its address space before fails the fill;
// afterwards there is nothing left to copy that a change could displace. Copies hold the process's
// lock for reading, and whoever serves a fault holds it for writing: it looks at the same pieces.

#pragma once

#include "prefill/cold.h"

#include <stdatomic.h>

enum { PIECE_PAGES = 512 };

enum piece_state { PIECE_TO_DO, PIECE_BUSY, PIECE_DONE };

struct piece { // to be copied: contiguous in memory and in the store, at most PIECE_PAGES
    uint64_t address;
    uint32_t slot;
    uint16_t pages;
    uint16_t state;
};

struct pieces { // ordered by address
    struct piece *piece;
    uint32_t used, room;
    uint32_t cursor; // none before it is to do
    uint32_t to_do;
};

// plan: what it says to be placed is left out, and counted.
int pieces_of(struct pieces *list, const struct image *image, struct page_map *map,
              const struct plan *plan, uint64_t *placed);
// The piece to do that has that page; NULL when there is none.
struct piece *pieces_find(struct pieces *list, uint64_t address);

struct process {
    struct process *next;
    int fd;
    uint32_t pid; // in the capsule; that of its parent for one that was forked meanwhile
    bool lost;    // it has ended
    pthread_rwlock_t still;
    struct pieces pieces; // changed under the fill's lock, or with still held for writing
    uint64_t not_before;  // ns: nothing is registered there yet
};

enum fill_phase {
    FILL_WAITS,    // for CRIU
    FILL_RUNS,     // CRIU restores, and may not be through with it
    FILL_FILLED,   // every page of the table is where it belongs
    FILL_FINISHED, // and CRIU has let the tree go: nothing is held any more
    FILL_FAILED,
};

struct fill_report {
    uint32_t phase, processes;
    uint64_t filled, total; // pages
    uint64_t faults, zeros, present, events;
    uint64_t placed; // pages that were there before CRIU began
    char why[WHY];
};

struct fill {
    struct store *store;
    const struct plan *plan;
    pthread_mutex_t lock;
    pthread_cond_t changed, work; // what a report says; something to copy
    struct process *processes;
    struct fill_report report;
    bool settled;        // CRIU has restored every process, so all that there will be is registered
    atomic_bool drained; // and all that it has said before was read
    bool finished;       // CRIU has said that the tree goes on
    bool stopping;
    uint32_t threads_used;
    pthread_t *thread, events;
    int epoll, wake, listener, connection;
    uint8_t heard[4];
    uint32_t heard_bytes;
    uint32_t expected; // pid whose descriptor comes next
};

// Listens on listener, which it takes over in any case. plan: of what an early CRIU has placed, or
// NULL. NULL with why.
struct fill *fill_start(struct store *s, int listener, uint32_t threads, const void *plan,
                        char *why);
// CRIU waits in its hook: every process has been handed over.
void fill_settle(struct fill *f);
// Until the phase is at least that, or FILL_FAILED, or so many ms have passed.
void fill_wait(struct fill *f, uint32_t phase, uint32_t ms, struct fill_report *report);
// Ends its threads, closes all descriptors.
void fill_stop(struct fill *f);

// For the parts of it, with the lock held:
void fill_fail(struct fill *f, const char *format, ...) __attribute__((format(printf, 2, 3)));
void fill_judge(struct fill *f);

// fill_copy.c
void *fill_copies(void *fill);
uint64_t fill_now(void);

// fill_events.c
void *fill_events(void *fill);
// A process whose memory is to be filled; takes over fd. With the lock held.
struct process *fill_adopt(struct fill *f, uint32_t pid, int fd);
int fill_heed(struct fill *f, struct process *p);

// fill_link.c: what CRIU says. False when there is nothing more to be read.
bool fill_listen(struct fill *f);
void fill_watch(struct fill *f, int fd, void *what);
