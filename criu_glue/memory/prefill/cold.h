// SPDX-License-Identifier: Apache-2.0
//
// Finds the cold memory of the store: memory that the job has not written lately. The prefill
// copies it into the early CRIU before the restore, in blocks of the size of a huge page. When
// another content comes for a page, the copy of that page is outdated. At the freeze the prefill
// copies outdated pages again, into the memory that is already there. It frees the pages that are
// still outdated after that, and the fill copies them like all others.

#pragma once

#include "prefill.h"
#include "store/store.h"

enum { BLOCK_LEAVES = BLOCK_PAGES / LEAF_PAGES };

struct cold_cursor { // the position of store_next_cold
    uint32_t process, place;
};

struct block {
    uint32_t pid, incarnation;
    uint64_t address;
    uint32_t fresh; // the early CRIU has no page of this block yet
    uint32_t slot[BLOCK_PAGES];
};

enum cold_when {
    COLD_RECEIVING, // chunks of a round come; its pages are hot, except those of the first round
    COLD_IDLE,      // no chunks come now, so the newest round counts as over
    COLD_FROZEN,    // the freeze: copy also hot pages, but only where the early CRIU has memory
};

// Finds the next block with pages to copy. From now on the pages in its slots count as placed. The
// store keeps their content until they are outdated. False when there is no such block any more.
bool store_next_cold(struct store *s, struct cold_cursor *at, enum cold_when when,
                     struct block *out);
// The caller reports that it could not copy the block, or not to where the tasks need it.
void store_not_copied(struct store *s, uint32_t pid, uint64_t address);

// Pages to be freed, as ranges. It is empty before it is given to one of the functions below, and
// the caller frees the list.
struct discards {
    struct prefill_discard *list;
    uint32_t used, room;
};

// Call it once the table is known. A copied page in [start, end) counts only if it is up to date
// and in the table. The function lists all others. -1 without memory.
int store_apply_table(struct store *s, uint32_t pid, uint64_t start, uint64_t end,
                      struct discards *discards);
// Call it once the plan is known. A page that no mapping of the plan moves does not count, and is
// listed as by store_apply_table.
int store_apply_plan(struct store *s, const struct plan *plan, uint32_t pid, uint64_t start,
                     uint64_t end, struct discards *discards);
// Returns the number of pages that count, of all processes in the table.
uint64_t store_preplaced(struct store *s);
// Compares samples of the placed pages in a restored process with the store. pid is the pid in the
// capsule, task the pid on the host. 0, or -1 with why.
int store_verify_preplaced(struct store *s, const struct plan *plan, uint32_t pid, int task,
                           char *why);

// For a block that was copied: from now on only the early CRIU keeps those of its pages that are
// up to date, and the store gives their memory back to the host. Returns how many pages these are.
// It does nothing once the table is known, since a complete image must stay complete.
uint32_t store_evict(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t address);
// For each block in [start, end) whose pages are mostly outdated: lists the outdated pages, as
// store_apply_table does. They then count as not copied.
int store_list_outdated(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t start,
                        uint64_t end, struct discards *discards);
// Finds the pages of a block that only the early CRIU keeps and that the plan does not move to
// their place (plan NULL: all that only it keeps). Their slots are in out. False: there are none.
bool store_orphaned(struct store *s, const struct plan *plan, uint32_t pid, uint32_t incarnation,
                    uint64_t address, struct block *out);
// The caller reports that the pages of the block are in their slots again.
void store_written_back(struct store *s, const struct block *block);
// Return the number of pages of the image, or of all images, that are neither in the store nor in
// their place in a task. plan NULL, and for all images: no page is in its place.
uint64_t image_lost(const struct image *image, struct page_map *map, const struct plan *plan);
uint64_t store_lost(struct store *s);

// Returns one bit for each page of the leaf that lies in a mapping that the plan moves.
uint64_t cold_planned(const struct plan *plan, uint32_t pid, const struct leaf *leaf);
// Returns one bit for each page of page's leaf that is in its place in the task; for the fill.
uint64_t cold_preplaced(const struct plan *plan, struct page_map *map, uint64_t page);
