// SPDX-License-Identifier: Apache-2.0
//
// The store keeps the pages that the destination has received for one migration. The pages lie in
// slots of 4 KiB in one file. The store knows which page of which process lies in which slot. At
// the end the source sends the table of the pages that exist. From the table the store makes lists
// of extents; an extent is contiguous in memory and in the file.
//
// The store writes pages with pwrite, not through the mapping. So a full file system gives an
// error and does not end the agent by SIGBUS. Several threads may call all functions.
//
// A store can also keep generations: the images of several freezes of one capsule, while the pages
// of the next freeze come (store_generations.c).

#pragma once

#include "chunk.h"
#include "page_map.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

// At most GENERATIONS are kept at the same time.
enum { PROCESSES_MOST = 32768, WRITERS_MOST = 64, GENERATIONS = 2 };

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

// One freeze that the store keeps, whatever is written later. Its pages count in their slots as the
// pages of a process do, and a slot with more than one page is never written.
struct generation {
    uint64_t number; // 0: this place is free
    struct image *image;
    uint32_t images;
    uint32_t readers; // from store_use to store_unuse
    bool dropped;     // the last reader frees it
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
    uint32_t *shared;               // by slot: how many pages lie in it besides the first one
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
    struct generation kept[GENERATIONS];
    bool evicted;                // at some time the content of a page lay only in an early CRIU
    atomic_bool free_after_copy; // a fill frees the slots that it copies (store_free_after_copy)
};

// Opens a store for at most limit pages. With keeps it has room for GENERATIONS besides, each of at
// most limit pages. On success the store owns fd. NULL with why.
struct store *store_open(int fd, uint64_t limit, bool keeps, char *why);
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
// Records that one page less lies in the slot. If none is left, the slot goes to the list.
void store_release_slot(struct store *s, uint32_t slot, struct slots *freed);
// Gives the memory of these slots back to the host, lets the slots be used again, and frees the
// list. No thread may be writing to them. The caller does not hold the lock.
void store_free_slots(struct store *s, struct slots *list);
// Sets a page's entry to value. If the page had another slot, the page gives that slot up.
int store_set(struct store *s, struct page_map *map, uint32_t *entry, uint32_t value, char *why);
// Returns the pages of the process. NULL: the store knows no such process.
struct page_map *store_find_process(const struct store *s, uint32_t pid);
// Makes the process if the store does not know it. NULL: that is not possible.
struct page_map *store_process(struct store *s, uint32_t pid);
// Forgets all pages of the process. Slots in which no page is left go to the list.
void store_drop_process(struct store *s, struct page_map *map, struct slots *freed);
// The caller counted as a writer (s->writers) and has finished.
void store_writer_done(struct store *s);
// Gives the memory of these slots back to the host, except slots in which several pages lie.
void store_free(struct store *s, uint32_t slot, uint32_t pages);
int store_write_slot(struct store *s, uint32_t slot, const void *from, size_t bytes, char *why);
// Whether several pages lie in the slot and their content is this one. Then another page with this
// content needs no slot of its own. No thread writes to such a slot, so it can be read.
bool store_shares(const struct store *s, uint32_t slot, const uint8_t *page);
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
// Returns the slot of a page of the extent, or PAGE_ZERO.
static inline uint32_t extent_slot(const struct extent *e, uint32_t page) {
    return e->slot >= FIRST_SLOT ? e->slot + page : PAGE_ZERO;
}
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
// Writes the next chunk of these images into CHUNK_LONGEST bytes. Returns its length; 0: the end.
size_t store_next_chunk(const struct store *s, const struct image *all, uint32_t images,
                        struct chunk_cursor *at, uint8_t *chunk);

// store_generations.c
// For store_close.
void store_generations_clear(struct store *s);
// Takes the lock at a moment at which no thread writes.
void store_lock_without_writers(struct store *s);
// The caller holds the lock. NULL: it is not kept.
struct generation *store_find_generation(struct store *s, uint64_t number);
// Counts the pages of the generation in their slots once more. The caller holds the lock.
void store_count_pages(struct store *s, const struct generation *g);
// The images of the tables become the generation, so store_images has none then. Waits until no
// thread writes. Fails if one of their pages has come again and lies elsewhere now, and if
// GENERATIONS are kept already. 0, or -1 with why; then nothing has changed.
int store_keep(struct store *s, uint64_t number, char *why);
// Forgets the generation. The memory of the slots that only it had goes back to the host, at once
// or when its last reader has finished. It does nothing if there is no such generation.
void store_drop(struct store *s, uint64_t number);
// Returns the generation, which stays as it is until store_unuse. NULL: it is not kept.
struct generation *store_use(struct store *s, uint64_t number);
void store_unuse(struct store *s, struct generation *generation);
// Writes the numbers of the kept generations, in no order, and returns how many there are.
uint32_t store_kept(struct store *s, uint64_t numbers[GENERATIONS]);
// After store_load_image of all its processes: these are the generation. 0, or -1 with why.
int store_load_generation(struct store *s, uint64_t number, char *why);
// All generations are loaded: gives back the memory of all slots that none of them has.
void store_end_load(struct store *s);

// store_revert.c
// From now on the processes have the pages of the generation and no others. This forgets what has
// come since, and pages that the generation's tables do not name: the source must forget the same
// (sent.h), else it takes them for known here. Number 0: they have no pages. The store then takes
// chunks again, also if a write has failed before. Waits until no thread writes. 0, or -1 with why;
// then nothing has changed.
int store_revert(struct store *s, uint64_t number, char *why);

// store_digest.c
// Computes the digest (digest.h) of the images: its low and its high sum.
void store_digest(const struct store *s, const struct image *image, uint32_t images,
                  uint64_t out[2]);
// Computes the difference between the sums of two kept generations, `image` minus `before`. It reads
// only pages that do not lie in the same slot in both. Returns false, without a result, if it would
// read more pages than store_digest reads for `image`.
bool store_digest_change(const struct store *s, const struct image *before, uint32_t befores,
                         const struct image *image, uint32_t images, uint64_t out[2]);
