// SPDX-License-Identifier: Apache-2.0
//
// The pages that have come for one migration: slots of 4 KiB in one file, and which page of which
// process lies in which slot. At the end the source says which pages exist (the table); what of
// them is here becomes a list of extents, each contiguous in memory and in the file.
//
// Pages are written with pwrite, not through the mapping: a file system that is full says so, and
// does not end the agent with SIGBUS. All functions may be called from several threads.

#pragma once

#include "chunk.h"
#include "page_map.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { PROCESSES_MOST = 32768, WHY = 256, WRITERS_LISTED = 64 };

struct extent {
    uint64_t address;
    uint32_t pages;
    uint32_t slot; // PAGE_ZERO, or FIRST_SLOT + the slot's number
};

struct image { // of one process, at standstill
    uint32_t pid;
    uint32_t incarnation;
    uint32_t extents;
    uint64_t pages, data; // all, and those that are not zero
    struct extent *extent;
};

struct want { // a page whose content was to be found here, and was not
    uint32_t pid, incarnation;
    uint64_t address;
    struct reference like;
};

struct slots {
    uint32_t *slot;
    uint32_t used, room;
};

struct store {
    int fd;
    uint8_t *map;
    uint64_t limit;    // pages that may be known
    uint64_t capacity; // slots of the file
    pthread_mutex_t lock;
    pthread_cond_t quiet;      // nobody writes
    struct page_map **process; // ordered by pid
    uint32_t processes;
    uint64_t known;
    uint64_t next;      // slots from here on were never used
    uint16_t *shared;   // by slot: how many pages lie in it besides the first
    uint8_t *seen;      // by slot, a bit: some page of a loaded image lies in it
    struct slots spare; // may be used again
    struct slots freed; // may be, once nobody writes
    uint32_t writers;
    uint64_t tickets;                 // writes that have begun
    uint64_t writing[WRITERS_LISTED]; // of them those that are under way; 0: none
    uint32_t unlisted;                // writers for which there is no place in the list
    uint32_t newest;                  // the last round of which a chunk has come
    bool broken;                      // a write has failed: what is said to be here may not be
    struct want *want;
    uint32_t wants, wants_room;
    struct image *image;
    uint32_t images;
    bool moved;        // of some page, at some time, the content lay elsewhere only
    atomic_bool spent; // a fill has taken it: what was in it is not to be had any more
};

// Takes the descriptor over when it succeeds. limit: pages. NULL with why.
struct store *store_open(int fd, uint64_t limit, char *why);
void store_close(struct store *s);

// One chunk; 0, or -1 with why.
int store_write(struct store *s, const uint8_t *raw, size_t length, char *why);
// Have bytes more of the file in memory before they are needed; 0, or -1 with why.
int store_reserve(struct store *s, uint64_t bytes, char *why);

// From now on a fill gives back what it has put in its place: it is the last that there can be.
void store_spend(struct store *s);
bool store_spent(const struct store *s);

// store_slots.c; with the lock held, but for store_content.
int store_slot(struct store *s, uint32_t *slot, char *why);
// Another page lies in a slot from now on; false when there are too many.
bool store_share(struct store *s, uint32_t slot);
// The page takes on a value, and its slot, if it had one and does not keep it, is free.
int store_set(struct store *s, struct page_map *map, uint32_t *entry, uint32_t value, char *why);
struct page_map *store_process(struct store *s, uint32_t pid);
void store_forget(struct store *s, struct page_map *map);
// One who has counted as a writer is none any more.
void store_done(struct store *s);
// Give so many slots' memory back to the host, but for those that several pages lie in.
void store_free(struct store *s, uint32_t slot, uint32_t pages);
int store_put(struct store *s, uint32_t slot, const void *from, size_t bytes, char *why);
static inline const uint8_t *store_content(const struct store *s, uint32_t slot) {
    return s->map + (uint64_t)(slot - FIRST_SLOT) * PAGE;
}

// store_references.c
int store_refer(struct store *s, struct page_map *map, uint64_t address, struct reference from,
                char *why);
// Look once more for what was not here, and list what still is not. NULL with why.
const struct want *store_wants(struct store *s, uint32_t *count, char *why);

// store_images.c
void store_images_clear(struct store *s);
const struct image *store_images(struct store *s, uint32_t *count);
// One process of the table: runs of (address, pages). 0, or -1 with why.
int store_image(struct store *s, uint32_t pid, uint32_t incarnation, const uint64_t *runs,
                uint32_t count, char *why);
// The same from extents that were kept.
int store_image_again(struct store *s, uint32_t pid, uint32_t incarnation,
                      const struct extent *extent, uint32_t count, char *why);

// An image's runs as store_image takes them, at most as many as there are extents; their number.
uint32_t store_runs(const struct image *image, uint64_t *runs);

struct forwarding { // where it stands
    uint32_t image, extent, page;
};
// The next chunk of all that the images consist of, in CHUNK_LONGEST bytes; its length, or 0.
size_t store_forward(struct store *s, struct forwarding *at, uint8_t *chunk);
