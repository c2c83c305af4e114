// SPDX-License-Identifier: Apache-2.0
//
// What was sent of one process: for each page the hash of what the destination has got, the pass
// in which it got it, and whether that was after the page was last known to be written.
//
// Blocks are made by sent_expect() in one thread; after that threads may record different pages.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "page.h"
#include "regions.h"

struct sent_hash {
    uint64_t low, high; // of XXH3-128; both 0: nothing was sent yet
};

struct sent_block {
    uint64_t number; // address / BLOCK
    uint64_t current[BLOCK_PAGES / 64];
    uint16_t pass[BLOCK_PAGES];
    struct sent_hash hash[BLOCK_PAGES];
};

struct sent {
    struct sent_block **table; // open addressing; size is a power of two
    size_t size, used;
};

struct sent *sent_new(void);
void sent_free(struct sent *sent);
void sent_clear(struct sent *sent);

// NULL when nothing of its block was ever expected.
struct sent_block *sent_find(const struct sent *sent, uint64_t address);
// The pages have been written: what was sent of them may no longer be what they hold. 0 or -ENOMEM.
int sent_expect(struct sent *sent, uint64_t start, uint64_t end);
// The same of all pages.
void sent_expect_all(struct sent *sent);
// Of these pages nothing is at the destination: those of them that were sent are added to list.
// 0 or -ENOMEM.
int sent_forget(struct sent *sent, uint64_t start, uint64_t end, struct regions *list);
// The end of the pages from start on that are all current, or all not; at most end.
uint64_t sent_same(const struct sent *sent, uint64_t start, uint64_t end, bool *current);

static inline size_t sent_index(uint64_t address) { return address / PAGE % BLOCK_PAGES; }

static inline void sent_record(struct sent_block *block, size_t index, struct sent_hash hash,
                               uint16_t pass) {
    block->hash[index] = hash;
    block->pass[index] = pass;
}

static inline void sent_make_current(struct sent_block *block, size_t index) {
    __atomic_fetch_or(&block->current[index / 64], UINT64_C(1) << index % 64, __ATOMIC_RELAXED);
}
