// SPDX-License-Identifier: Apache-2.0
//
// Pages of a process into chunks for the wire, by any number of threads, each with a chunk of its
// own. Pages of which the destination has the content already are left out.

#pragma once

#include <pthread.h>
#include <sys/types.h>

#include "chunk.h"
#include "regions.h"
#include "sent.h"

enum { PULL_MOST_REFERENCES = 4096 };

struct pull_state {
    uint64_t unreadable, first_unreadable; // pages that were not there any more
    uint64_t unchanged;                    // pages that the destination has
    int error;                             // why it ended early: -ESRCH
};

// One process's pages that are to be read.
struct pull {
    pid_t pid;
    int memory;  // its /proc/PID/mem
    int pagemap; // its /proc/PID/pagemap, where it may share pages with another process; or -1
    uint32_t inner, incarnation, round;
    uint16_t pass;
    const struct regions *regions;
    struct sent *sent;
    const struct sent *parent; // of the process that it was forked from, or NULL
    uint32_t parent_pid;

    pthread_mutex_t lock; // what follows is all threads'
    size_t next;          // region
    uint64_t offset;      // in it
    struct pull_state state;
};

struct pull_run {
    uint64_t address;
    uint32_t pages, kind;
};

// A chunk that is being made.
struct pull_chunk {
    uint8_t *at; // CHUNK_LONGEST bytes; the pages lie at PAGE already
    size_t pages;
    size_t runs, reference_runs, references;
    struct pull_run run[CHUNK_RUNS];           // those with pages and zeros
    struct pull_run reference_run[CHUNK_RUNS]; // come behind them
    uint8_t reference[PULL_MOST_REFERENCES * REFERENCE];
};

struct pull *pull_new(pid_t pid, int memory, int pagemap, uint32_t inner, uint32_t incarnation,
                      uint32_t round, uint16_t pass, const struct regions *regions,
                      struct sent *sent);
// The process that it was forked from, what was sent of that, and its inner pid.
void pull_refer_to(struct pull *pull, const struct sent *parent, uint32_t parent_pid);
void pull_free(struct pull *pull);

struct pull_state pull_state(struct pull *pull);

enum { PULL_DONE = 0, PULL_FULL = 1, PULL_PAUSE = 2 };
// Read on until the chunk is full, nothing is left, or about budget bytes were read; read says how
// many were. What was put into a chunk counts as sent from then on.
int pull_fill(struct pull *pull, struct pull_chunk *chunk, uint64_t budget, uint64_t *read);

struct pull_chunk *pull_chunk_new(void);
void pull_chunk_free(struct pull_chunk *chunk);
void pull_chunk_begin(struct pull_chunk *chunk, void *at);
// Writes the head; the chunk's length in bytes, 0 when there is nothing in it.
size_t pull_chunk_end(struct pull_chunk *chunk, const struct pull *pull);
