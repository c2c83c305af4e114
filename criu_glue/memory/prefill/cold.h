// SPDX-License-Identifier: Apache-2.0
//
// What of the store may be put in place before the tree is restored: memory that the job has not
// written of late, by blocks of the size of a huge page. Whatever comes for a page afterwards makes
// what was put there outdated, page by page. Once the job stands still that is copied again, into
// memory that is at hand; what then is outdated still is let go of and filled in as any other.

#pragma once

#include "prefill.h"
#include "store/store.h"

enum { BLOCK_LEAVES = BLOCK_PAGES / LEAF_PAGES };

// NULL when it is not known.
struct page_map *cold_process(const struct store *s, uint32_t pid);

// The bits of a leaf's pages from the page's on, up to the end of the leaf or to end.
static inline uint64_t leaf_bits(uint64_t page, uint64_t end) {
    uint64_t many = end - page;
    uint64_t all = many >= LEAF_PAGES ? ~UINT64_C(0) : (UINT64_C(1) << many) - 1;
    return all << (page & (LEAF_PAGES - 1));
}

struct search { // where it stands
    uint32_t process, place;
};

struct block {
    uint32_t pid, incarnation;
    uint64_t address;
    uint32_t fresh; // there is nothing of it yet
    uint32_t slot[BLOCK_PAGES];
};

enum cold_when {
    COLD_COMING,  // while rounds come
    COLD_IDLE,    // nothing comes at present, so the last round counts as one that is over
    COLD_AT_LAST, // the job stands still: what has come is what it is to have, hot or not; but
                  // only where something was copied before, and so memory is at hand
};

// The next block of which something is to be copied; what its slots name counts as copied from now
// on, and stays as it is in the store until it is outdated. False at the end of all.
bool store_cold(struct store *s, struct search *at, enum cold_when when, struct block *out);
// The block was not copied, or not to where it is needed.
void store_not_copied(struct store *s, uint32_t pid, uint64_t address);
// The table is known: of what was copied in [start, end) only what is of the image counts; the rest
// is listed, in memory of the caller's (free). -1 without memory.
int store_settle(struct store *s, uint32_t pid, uint64_t start, uint64_t end,
                 struct prefill_drop **drop, uint32_t *drops);
// The plan is known: what no mapping of it takes along does not count, and is listed like that.
int store_unplanned(struct store *s, const struct plan *plan, uint32_t pid, uint64_t start,
                    uint64_t end, struct prefill_drop **drop, uint32_t *drops);
// What counts of all that was copied for processes of the table; pages.
uint64_t store_placed(struct store *s);
// Look at some pages that were placed in the process, which the host calls task, where they belong.
// 0, or -1 with why.
int store_placed_right(struct store *s, const struct plan *plan, uint32_t pid, int task, char *why);

// A block that was copied: what is right of it is kept only there from now on, and the store's
// memory of it goes back to the host. Not once the table is known: an image is whole or not, and
// stays so.
// Returns how many pages.
uint32_t store_move(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t address);
// Where most of a block is outdated, what is so is listed like for store_settle, and counts as not
// copied.
int store_outdated(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t start,
                   uint64_t end, struct prefill_drop **drop, uint32_t *drops);
// Of a block, where the plan, if there is one, puts nothing in place: what is kept nowhere else; its
// slots, in out. False when there is nothing.
bool store_stranded(struct store *s, const struct plan *plan, uint32_t pid, uint32_t incarnation,
                    uint64_t address, struct block *out);
// That was written into its slots again.
void store_brought_back(struct store *s, const struct block *block);
// Pages of the images that are neither in the store nor in their place; plan: NULL, none is.
uint64_t store_absent(struct store *s, const struct plan *plan);
uint64_t image_absent(const struct image *image, struct page_map *map, const struct plan *plan);

// Of the leaf's pages those that a mapping's move is to put in their place; a bit for each.
uint64_t cold_planned(const struct plan *plan, uint32_t pid, const struct leaf *leaf);
// The same of those that are there already; for the fill.
uint64_t cold_placed(const struct plan *plan, struct page_map *map, uint64_t page);
