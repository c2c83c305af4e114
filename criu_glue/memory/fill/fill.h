// SPDX-License-Identifier: Apache-2.0
//
// The fill copies pages of the store into a tree that CRIU restores with --lazy-pages. It takes the
// place of CRIU's own lazy-pages daemon. CRIU hands over one userfaultfd for each process. In it
// CRIU has registered every VMA that is not in its images. Threads copy the pages in.
//
// One thread reads all descriptors. From them the kernel reports faults, forks and changes of the
// address space, and it holds the process until the thread has read the message. The tree runs
// only after all of its pages are in place. So a process that forks or changes its address space
// before that fails the fill. After that no copies are left that a change could displace.
//
// The copying threads hold the process's copy_lock for reading. The thread that serves a fault
// uses the same pieces, so it holds that lock for writing.

#pragma once

#include "prefill/cold.h"

#include <stdatomic.h>

enum { PIECE_PAGES = 512 };

enum piece_state { PIECE_TO_DO, PIECE_BUSY, PIECE_DONE };

struct piece { // at most PIECE_PAGES pages to copy, contiguous in memory and in the store
    uint64_t address;
    uint32_t slot;
    uint16_t pages;
    uint16_t state;
};

struct pieces { // ordered by address
    struct piece *piece;
    uint32_t used, room;
    uint32_t cursor; // no piece before this one is PIECE_TO_DO
    uint32_t to_do;  // pieces that are not PIECE_DONE
};

// Makes the list of an image's pieces. It leaves out the pages that are placed according to the
// plan, and adds their number to *preplaced.
int pieces_of(struct pieces *list, const struct image *image, struct page_map *map,
              const struct plan *plan, uint64_t *preplaced);
// Returns the piece in PIECE_TO_DO that contains the page, or NULL.
struct piece *pieces_find(struct pieces *list, uint64_t address);

struct process {
    struct process *next;
    int fd;
    uint32_t pid; // in the capsule; for a process that was forked during the fill, its parent's
    bool exited;  // the process has ended
    pthread_rwlock_t copy_lock;
    struct pieces pieces; // changed under the fill's lock, or with copy_lock held for writing
    uint64_t not_before;  // ns: do not copy before; CRIU had not registered the memory yet
};

enum fill_phase {
    FILL_WAITING,  // CRIU has not connected yet
    FILL_RUNNING,  // CRIU restores, or pages are still to be copied
    FILL_FILLED,   // every page of the table is where it belongs
    FILL_FINISHED, // also, CRIU has let the tree go, and all descriptors are closed
    FILL_FAILED,
};

struct fill_report {
    uint32_t phase, processes;
    uint64_t filled, total; // pages
    uint64_t preplaced;     // pages that the prefill has put in place
    char why[WHY];
};

struct fill {
    struct store *store;
    const struct plan *plan;
    pthread_mutex_t lock;
    pthread_cond_t changed, work; // the report has changed; there may be something to copy
    struct process *processes;
    struct fill_report report;
    bool all_registered; // CRIU has restored every process, so all memory is registered
    atomic_bool drained; // also, the events thread has read all that CRIU sent before that
    bool finished;       // CRIU has said that the tree goes on
    bool stopping;
    uint32_t threads_used;
    pthread_t *thread, events;
    int epoll, wake, listener, connection;
    uint8_t received[4];
    uint32_t received_bytes;
    uint32_t expected; // pid of the process whose descriptor comes next; 0: none
};

// Starts a fill that waits for CRIU on listener. The fill owns listener, also after an error. plan
// is the plan of an early CRIU, or NULL. Returns NULL with why after an error.
struct fill *fill_start(struct store *s, int listener, uint32_t threads, const struct plan *plan,
                        char *why);
// The caller reports that CRIU waits in its hook: CRIU has handed over every process.
void fill_all_registered(struct fill *f);
// Waits until the phase is at least that, or FILL_FAILED, but at most ms. Then fills in the report.
void fill_wait(struct fill *f, uint32_t phase, uint32_t ms, struct fill_report *report);
// Ends the fill's threads and closes all descriptors.
void fill_stop(struct fill *f);

// These are for the parts of the fill. The caller holds the lock.
void fill_fail(struct fill *f, const char *format, ...) __attribute__((format(printf, 2, 3)));
void fill_update_phase(struct fill *f);

// fill_copy.c
void *fill_copy_thread(void *fill);
uint64_t fill_now(void);

// fill_events.c
void *fill_event_thread(void *fill);
// Adds a process whose memory the fill must copy; it owns fd. The caller holds the lock.
struct process *fill_add_process(struct fill *f, uint32_t pid, int fd);

// fill_criu.c
// Reads the next message of CRIU. False when no more can be read now.
bool fill_read_criu(struct fill *f);
void fill_watch(struct fill *f, int fd, void *what);
