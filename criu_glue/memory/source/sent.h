// SPDX-License-Identifier: Apache-2.0
//
// What the source has sent of one process. For each page it has the hash of the content that the
// source sent last, the pass in which it sent that, and whether the page is current: the source has
// read it since the page was last listed as written.
//
// One thread makes blocks with sent_invalidate(). After that, several threads may record pages, if
// they are different pages.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "page.h"
#include "regions.h"

struct sent_hash {
    uint64_t low, high; // halves of XXH3-128; both 0: nothing was sent yet
};

struct sent_block {
    uint64_t number; // address / BLOCK
    uint64_t current[BLOCK_PAGES / 64];
    uint32_t pass[BLOCK_PAGES];
    struct sent_hash hash[BLOCK_PAGES];
};

struct sent {
    struct sent_block **table; // open addressing; size is a power of two
    size_t size, used;
};

struct sent *sent_new(void);
void sent_free(struct sent *sent);
void sent_clear(struct sent *sent);

// Returns the block of the address, or NULL when sent_invalidate() has made no such block.
struct sent_block *sent_find(const struct sent *sent, uint64_t address);
// Marks the pages as not current: they may have been written since they were sent. 0 or -ENOMEM.
int sent_invalidate(struct sent *sent, uint64_t start, uint64_t end);
// Marks all pages of all blocks as not current.
void sent_invalidate_all(struct sent *sent);
// The destination has nothing of these pages. Forgets their hashes, and adds the pages that were
// sent to list. 0 or -ENOMEM.
int sent_forget(struct sent *sent, uint64_t start, uint64_t end, struct regions *list);
// Forgets all pages that are not in present, and frees the blocks that have no page in it. 0, or
// -ENOMEM: then nothing was forgotten.
int sent_keep(struct sent *sent, const struct regions *present);
// Returns the end of the pages from start on that are all current, or all not current; at most end.
uint64_t sent_run_end(const struct sent *sent, uint64_t start, uint64_t end, bool *current);

// Adds the present pages of a process to the digest of an image (digest.h), whose low and high sum
// are in out. inner is the process's pid in the capsule. 0, or -ENODATA: a page is not current, so
// it was not sent or may have been written since. Then out is as before.
int sent_digest(const struct sent *sent, const struct regions *present, uint32_t inner,
                uint64_t out[2]);

static inline size_t sent_index(uint64_t address) { return address / PAGE % BLOCK_PAGES; }

static inline void sent_record(struct sent_block *block, size_t index, struct sent_hash hash,
                               uint32_t pass) {
    block->hash[index] = hash;
    block->pass[index] = pass;
}

static inline void sent_make_current(struct sent_block *block, size_t index) {
    __atomic_fetch_or(&block->current[index / 64], UINT64_C(1) << index % 64, __ATOMIC_RELAXED);
}
