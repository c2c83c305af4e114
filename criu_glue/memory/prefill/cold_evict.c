// SPDX-License-Identifier: Apache-2.0
//
// This is for a host that has no memory for a page twice: only the early CRIU keeps the pages that
// were put in place. If the early CRIU ends, these pages are lost. Until the table is known, the
// destination can ask the source for them again. After that the restore fails, and the tree goes
// on at its source.

#include "cold.h"

static struct page_map *map_of(struct store *s, uint32_t pid, uint32_t incarnation) {
    struct page_map *map = store_find_process(s, pid);
    return map != NULL && map->incarnation == incarnation ? map : NULL;
}

// Returns the bits of the leaf's pages that are placed and whose slot no other page uses. The
// caller holds the lock.
static uint64_t evictable(const struct store *s, const struct leaf *leaf) {
    uint64_t found = 0;
    for (int i = 0; i < LEAF_PAGES; i++)
        if (leaf->page[i] >= FIRST_SLOT && s->shared[leaf->page[i] - FIRST_SLOT] == 0)
            found |= UINT64_C(1) << i;
    return found & leaf->preplaced & ~leaf->evicted;
}

static uint32_t evict(struct store *s, struct leaf *leaf) {
    uint64_t bits = evictable(s, leaf);
    if (!(leaf->preplaced & ~leaf->evicted & ~bits))
        bits &= bits - 1; // one page stays, so that store_verify_preplaced can compare it
    leaf->evicted |= bits;
    s->evicted |= bits != 0;
    uint32_t evicted = (uint32_t)__builtin_popcountll(bits);
    while (bits) {
        uint32_t begin = (uint32_t)__builtin_ctzll(bits), many = 1;
        while (begin + many < LEAF_PAGES && bits >> (begin + many) & 1 &&
               leaf->page[begin + many] == leaf->page[begin] + many)
            many++;
        store_free(s, leaf->page[begin], many);
        bits &= begin + many < LEAF_PAGES ? ~UINT64_C(0) << (begin + many) : 0;
    }
    return evicted;
}

uint32_t store_evict(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t address) {
    pthread_mutex_lock(&s->lock);
    struct page_map *map = s->images == 0 ? map_of(s, pid, incarnation) : NULL;
    uint32_t evicted = 0;
    for (uint64_t first = 0; map != NULL && first < BLOCK_PAGES; first += LEAF_PAGES) {
        struct leaf *leaf = page_map_leaf(map, address / PAGE + first);
        if (leaf != NULL)
            evicted += evict(s, leaf);
    }
    pthread_mutex_unlock(&s->lock);
    return evicted;
}

bool store_orphaned(struct store *s, const struct plan *plan, uint32_t pid, uint32_t incarnation,
                    uint64_t address, struct block *out) {
    bool found = false;
    *out = (struct block){.pid = pid, .incarnation = incarnation, .address = address};
    pthread_mutex_lock(&s->lock);
    struct page_map *map = map_of(s, pid, incarnation);
    for (uint64_t first = 0; map != NULL && first < BLOCK_PAGES; first += LEAF_PAGES) {
        const struct leaf *leaf = page_map_leaf(map, address / PAGE + first);
        if (leaf == NULL || leaf->evicted == 0)
            continue;
        uint64_t left = leaf->evicted;
        if (plan != NULL)
            left &= ~cold_planned(plan, pid, leaf);
        found |= left != 0;
        for (; left; left &= left - 1)
            out->slot[first + (uint64_t)__builtin_ctzll(left)] = leaf->page[__builtin_ctzll(left)];
    }
    pthread_mutex_unlock(&s->lock);
    return found;
}

void store_written_back(struct store *s, const struct block *block) {
    pthread_mutex_lock(&s->lock);
    struct page_map *map = map_of(s, block->pid, block->incarnation);
    for (uint64_t i = 0; map != NULL && i < BLOCK_PAGES; i++) {
        struct leaf *leaf = page_map_leaf(map, block->address / PAGE + i);
        uint64_t bit = UINT64_C(1) << i % LEAF_PAGES;
        if (leaf != NULL && block->slot[i] >= FIRST_SLOT) {
            leaf->evicted &= ~bit;
            leaf->preplaced &= ~bit;
        }
    }
    pthread_mutex_unlock(&s->lock);
}

uint64_t image_lost(const struct image *image, struct page_map *map, const struct plan *plan) {
    uint64_t lost = 0;
    for (uint32_t i = 0; i < image->extents; i++) {
        uint64_t page = image->extent[i].address / PAGE, end = page + image->extent[i].pages;
        for (; page < end; page = (page | (LEAF_PAGES - 1)) + 1) {
            const struct leaf *leaf = page_map_leaf(map, page);
            if (leaf == NULL || leaf->evicted == 0)
                continue;
            uint64_t evicted = leaf->evicted & page_bits(page, end);
            if (plan != NULL)
                evicted &= ~cold_preplaced(plan, map, page);
            lost += (uint64_t)__builtin_popcountll(evicted);
        }
    }
    return lost;
}

uint64_t store_lost(struct store *s) {
    uint64_t lost = 0;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; s->evicted && i < s->images; i++)
        lost += image_lost(&s->image[i], store_process(s, s->image[i].pid), NULL);
    pthread_mutex_unlock(&s->lock);
    return lost;
}
