// SPDX-License-Identifier: Apache-2.0

#include "cold.h"

enum {
    LEAST_PAGES = BLOCK_PAGES / 2, // for fewer pages a huge page is not worth it
    MOST_COPIES = 4,               // pages that are outdated after so many copies are not cold
};

// Returns the bits of the leaf's pages that can be copied now. The caller holds the lock.
static uint64_t copyable(const struct leaf *leaf, uint64_t oldest, uint32_t newest_round,
                         enum cold_when when) {
    uint64_t found = 0;
    // The first round (0) brings all pages, so its pages are not hot.
    bool recent = newest_round > 0 && leaf->round >= newest_round && when == COLD_RECEIVING;
    if (leaf->ticket >= oldest)
        return 0; // a thread may be writing these pages now
    if (when != COLD_FROZEN && (recent || leaf->copies >= MOST_COPIES))
        return 0; // the job has written the pages lately
    uint64_t asked = ~leaf->preplaced & (when == COLD_FROZEN ? leaf->copied : ~UINT64_C(0));
    for (int i = 0; asked && i < LEAF_PAGES; i++)
        if (leaf->page[i] == PAGE_ZERO || leaf->page[i] >= FIRST_SLOT)
            found |= UINT64_C(1) << i;
    return found & asked;
}

// Returns the bits of the leaf's pages that a process with a lower pid has at the same address and
// in the same slot. These are pages that a child still shares with its parent, which usually has
// the lower pid. CRIU lets the child take them over from the parent (criu: mem.c,
// prepare_cow_vmas), so a copy for the child would be of no use.
static uint64_t inherited(const struct store *s, uint32_t process, const struct leaf *leaf) {
    uint64_t shared = 0, found = 0;
    for (int i = 0; i < LEAF_PAGES; i++)
        if (leaf->page[i] >= FIRST_SLOT && s->shared[leaf->page[i] - FIRST_SLOT] > 0)
            shared |= UINT64_C(1) << i;
    for (uint32_t p = 0; shared & ~found && p < process; p++) {
        const struct leaf *theirs = page_map_leaf(s->process[p], leaf->number << LEAF_BITS);
        for (int i = 0; theirs != NULL && i < LEAF_PAGES; i++)
            if (theirs->page[i] == leaf->page[i])
                found |= shared & UINT64_C(1) << i;
    }
    return found;
}

static bool take_block(struct store *s, uint32_t process, uint64_t number, uint64_t oldest,
                       enum cold_when when, struct block *out) {
    struct page_map *map = s->process[process];
    struct leaf *leaf[BLOCK_LEAVES];
    uint64_t pages[BLOCK_LEAVES];
    uint64_t copied = 0;
    int all = 0, own = 0;
    for (int i = 0; i < BLOCK_LEAVES; i++) {
        leaf[i] = page_map_leaf(map, (number + (uint64_t)i) << LEAF_BITS);
        if (leaf[i] == NULL) // the block needs the bits of all its leaves
            return false;
        pages[i] = copyable(leaf[i], oldest, s->newest_round, when);
        copied |= leaf[i]->copied;
        all += __builtin_popcountll(pages[i]);
    }
    bool receiving =
        s->newest_round == 0 && when == COLD_RECEIVING; // other pages of it may be on their way
    int enough = receiving ? BLOCK_PAGES : copied ? 1 : LEAST_PAGES;
    if (all < enough)
        return false;
    for (int i = 0; !copied && i < BLOCK_LEAVES; i++)
        own += __builtin_popcountll(pages[i] & ~inherited(s, process, leaf[i]));
    if (!copied && own < LEAST_PAGES) {
        for (int i = 0; i < BLOCK_LEAVES; i++)
            leaf[i]->copies = MOST_COPIES; // so the search passes over this block from now on
        return false;
    }
    out->pid = map->pid;
    out->incarnation = map->incarnation;
    out->address = (number << LEAF_BITS) * PAGE;
    out->fresh = copied == 0;
    for (int i = 0; i < BLOCK_LEAVES; i++) {
        leaf[i]->copied |= when == COLD_FROZEN ? 0 : ~UINT64_C(0);
        leaf[i]->preplaced |= pages[i];
        leaf[i]->copies += pages[i] != 0;
        for (int k = 0; k < LEAF_PAGES; k++)
            out->slot[i * LEAF_PAGES + k] = pages[i] >> k & 1 ? leaf[i]->page[k] : PAGE_UNKNOWN;
    }
    return true;
}

bool store_next_cold(struct store *s, struct cold_cursor *at, enum cold_when when,
                     struct block *out) {
    bool found = false;
    pthread_mutex_lock(&s->lock);
    uint64_t oldest = UINT64_MAX;
    for (uint32_t i = 0; i < WRITERS_MOST; i++)
        if (s->writing[i] && s->writing[i] < oldest)
            oldest = s->writing[i];
    for (; at->process < s->processes && !found; at->process++, at->place = 0) {
        const struct page_map *map = s->process[at->process];
        while (at->place < map->size && !found) {
            const struct leaf *leaf = map->table[at->place++];
            if (leaf == NULL)
                continue;
            // At the freeze the tree waits, so only outdated pages are examined.
            bool due = when == COLD_FROZEN ? (leaf->copied & ~leaf->preplaced) != 0
                                           : leaf->number % BLOCK_LEAVES == 0;
            uint64_t first = leaf->number / BLOCK_LEAVES * BLOCK_LEAVES;
            found = due && take_block(s, at->process, first, oldest, when, out);
        }
        if (found)
            break;
    }
    pthread_mutex_unlock(&s->lock);
    return found;
}

void store_not_copied(struct store *s, uint32_t pid, uint64_t address) {
    pthread_mutex_lock(&s->lock);
    struct page_map *map = store_find_process(s, pid);
    for (int i = 0; map != NULL && i < BLOCK_LEAVES; i++) {
        struct leaf *leaf = page_map_leaf(map, address / PAGE + (uint64_t)i * LEAF_PAGES);
        if (leaf != NULL)
            leaf->preplaced = leaf->copied = 0;
    }
    pthread_mutex_unlock(&s->lock);
}
