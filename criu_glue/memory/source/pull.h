// SPDX-License-Identifier: Apache-2.0
//
// Reads pages of a process and puts them into chunks for the wire. Any number of threads may do it,
// each with its own chunk. Pages whose content the destination already has are left out.

#pragma once

#include <pthread.h>
#include <sys/types.h>

#include "chunk.h"
#include "regions.h"
#include "sent.h"

enum { PULL_MOST_REFERENCES = 4096 };

struct pull_state {
    uint64_t unreadable, first_unreadable; // number of unreadable pages, address of the first
    int error;                             // 0, or -ESRCH: the process has ended
};

// The pages of one process that must be read.
struct pull {
    pid_t pid;
    int memory;  // descriptor of /proc/PID/mem
    int pagemap; // descriptor of /proc/PID/pagemap; -1: it shares no pages with another process
    uint32_t inner, incarnation, round;
    uint32_t pass;
    const struct regions *regions;
    struct sent *sent;
    const struct sent *parent; // what was sent of its parent process, or NULL
    uint32_t parent_pid;

    pthread_mutex_t lock; // for the members below, which all threads use
    size_t next;          // index of the next region to read
    uint64_t offset;      // position in that region
    struct pull_state state;
};

// A chunk that one thread is making.
struct pull_chunk {
    uint8_t *at; // CHUNK_LONGEST bytes; the content of pages is written at offset PAGE at once
    size_t pages;
    size_t runs, reference_runs, references;
    struct run run[CHUNK_RUNS];           // runs of data and of zeros
    struct run reference_run[CHUNK_RUNS]; // in the chunk they come behind those in run
    uint8_t reference[PULL_MOST_REFERENCES * REFERENCE];
};

struct pull *pull_new(pid_t pid, int memory, int pagemap, uint32_t inner, uint32_t incarnation,
                      uint32_t round, uint32_t pass, const struct regions *regions,
                      struct sent *sent);
// Lets the pull refer to pages of the process's parent. parent: what was sent of that one;
// parent_pid: its inner pid.
void pull_refer_to(struct pull *pull, const struct sent *parent, uint32_t parent_pid);
void pull_free(struct pull *pull);

struct pull_state pull_state(struct pull *pull);

enum { PULL_DONE = 0, PULL_FULL = 1, PULL_PAUSE = 2 };
// Reads pages into the chunk until the chunk is full (PULL_FULL), no pages are left (PULL_DONE), or
// about budget bytes were read (PULL_PAUSE). read: how many bytes were read. Pages in a chunk count
// as sent from then on.
int pull_fill(struct pull *pull, struct pull_chunk *chunk, uint64_t budget, uint64_t *read);

struct pull_chunk *pull_chunk_new(void);
void pull_chunk_free(struct pull_chunk *chunk);
void pull_chunk_begin(struct pull_chunk *chunk, void *at);
// Writes the head. Returns the chunk's length in bytes, or 0 when the chunk is empty.
size_t pull_chunk_end(struct pull_chunk *chunk, const struct pull *pull);
