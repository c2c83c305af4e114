// SPDX-License-Identifier: Apache-2.0
//
// The store keeps the pages that the destination has received for one migration. The pages lie in
// slots of 4 KiB in one file. The store knows which page of which process lies in which slot. At
// the end the source sends the table of the pages that exist. From the table the store makes lists
// of extents; an extent is contiguous in memory and in the file.
//
// The store writes pages with pwrite, not through the mapping. So a full file system gives an
// error and does not end the agent by SIGBUS. Several threads may call all functions.

#pragma once

#include "chunk.h"
#include "page_map.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { PROCESSES_MOST = 32768, WRITERS_MOST = 64 };

struct extent {
    uint64_t address;
    uint32_t pages;
    uint32_t slot; // PAGE_ZERO, or FIRST_SLOT + the slot's number
};

struct image { // the memory of one process at the freeze
    uint32_t pid;
    uint32_t incarnation;
    uint32_t extents;
    uint64_t pages, data; // all pages, and the pages that are not zero
    struct extent *extent;
};

struct want { // a page that a reference named, and whose content the store does not have
    uint32_t pid, incarnation;
    uint64_t address;
    struct reference reference;
};

struct slots {
    uint32_t *slot;
    uint32_t used, room;
};

struct store {
    int fd;
    uint8_t *map;
    uint64_t limit;    // the most pages that may be known
    uint64_t capacity; // slots of the file
    pthread_mutex_t lock;
    pthread_cond_t no_writers; // no thread writes
    struct page_map **process; // ordered by pid
    uint32_t processes;
    uint64_t known;
    uint64_t next;                  // slots from this one on were never used
    uint16_t *shared;               // by slot: how many pages lie in it besides the first one
    uint8_t *in_image;              // one bit by slot: a page of a loaded image lies in it
    struct slots free_slots;        // slots that may be used again
    struct slots freed_slots;       // slots that may be used again once no thread writes
    uint32_t writers;               // a thread that would be one more than WRITERS_MOST waits
    uint64_t tickets;               // number of writes that have begun; each has one as ticket
    uint64_t writing[WRITERS_MOST]; // the tickets of writes under way; 0: this place is free
    uint32_t newest_round;          // the highest round of all chunks so far
    bool broken;                    // a write has failed, so a slot may lack its content
    struct want *want;
    uint32_t wants, wants_room;
    struct image *image;
    uint32_t images;
    bool evicted;                // at some time the content of a page lay only in an early CRIU
    atomic_bool free_after_copy; // a fill frees the slots that it copies (store_free_after_copy)
};

// Opens a store for at most limit pages. On success the store owns fd. NULL with why.
struct store *store_open(int fd, uint64_t limit, char *why);
void store_close(struct store *s);

// Takes one chunk. Returns 0, or -1 with why.
int store_write(struct store *s, const uint8_t *raw, size_t length, char *why);
// Allocates the next bytes of the file in memory before they are needed. 0, or -1 with why.
int store_reserve(struct store *s, uint64_t bytes, char *why);

// From now on a fill frees each slot that it has copied. No other fill is possible after that one.
void store_free_after_copy(struct store *s);

// These are in store_slots.c. The caller holds the lock, except for store_content.
int store_allocate_slot(struct store *s, uint32_t *slot, char *why);
// Records that one more page lies in the slot. False when too many pages lie in it.
bool store_reference_slot(struct store *s, uint32_t slot);
// Sets a page's entry to value. If the page had another slot, the page gives that slot up.
int store_set(struct store *s, struct page_map *map, uint32_t *entry, uint32_t value, char *why);
// Returns the pages of the process. NULL: the store knows no such process.
struct page_map *store_find_process(const struct store *s, uint32_t pid);
// Makes the process if the store does not know it. NULL: that is not possible.
struct page_map *store_process(struct store *s, uint32_t pid);
void store_drop_process(struct store *s, struct page_map *map);
// The caller counted as a writer (s->writers) and has finished.
void store_writer_done(struct store *s);
// Gives the memory of these slots back to the host, except slots in which several pages lie.
void store_free(struct store *s, uint32_t slot, uint32_t pages);
int store_write_slot(struct store *s, uint32_t slot, const void *from, size_t bytes, char *why);
static inline const uint8_t *store_content(const struct store *s, uint32_t slot) {
    return s->map + (uint64_t)(slot - FIRST_SLOT) * PAGE;
}

// store_references.c
int store_resolve_reference(struct store *s, struct page_map *map, uint64_t address,
                            struct reference from, char *why);
// Looks again for the content of all wanted pages, and lists those that are still wanted. NULL
// with why.
const struct want *store_wants(struct store *s, uint32_t *count, char *why);

// store_images.c
void store_images_clear(struct store *s);
const struct image *store_images(struct store *s, uint32_t *count);
// Returns the image of the process. NULL: there is none.
const struct image *store_find_image(const struct store *s, uint32_t pid);
// Takes the table of one process: runs of (address, pages). 0, or -1 with why.
int store_image(struct store *s, uint32_t pid, uint32_t incarnation, const uint64_t *runs,
                uint32_t count, char *why);
// Takes one process from saved extents instead of a table. 0, or -1 with why.
int store_load_image(struct store *s, uint32_t pid, uint32_t incarnation,
                     const struct extent *extent, uint32_t count, char *why);

// Writes an image's runs, in the form that store_image takes, and returns their number. There are
// at most as many runs as extents.
uint32_t store_runs(const struct image *image, uint64_t *runs);

struct chunk_cursor { // the position of store_next_chunk
    uint32_t image, extent, page;
};
// Writes the next chunk of the images into CHUNK_LONGEST bytes. Returns its length; 0: the end.
size_t store_next_chunk(struct store *s, struct chunk_cursor *at, uint8_t *chunk);
