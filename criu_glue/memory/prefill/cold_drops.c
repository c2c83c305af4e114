// SPDX-License-Identifier: Apache-2.0
//
// Lists the pages in the early CRIU that must be freed: pages that are outdated, that are not in
// the table, or that no mapping of the plan moves.

#include "cold.h"

#include <stdlib.h>

enum { WORTH = BLOCK_PAGES / 2 }; // fewer pages give the host too little memory back

struct drops {
    struct prefill_drop *list;
    uint32_t used, room;
};

static int add(struct drops *drops, uint64_t address) {
    struct prefill_drop *last = drops->used ? &drops->list[drops->used - 1] : NULL;
    if (last != NULL && last->address + last->pages * PAGE == address) {
        last->pages++;
        return 0;
    }
    if (drops->used == drops->room) {
        uint32_t room = drops->room * 2 + 256;
        struct prefill_drop *larger = realloc(drops->list, room * sizeof *larger);
        if (larger == NULL)
            return -1;
        drops->list = larger;
        drops->room = room;
    }
    drops->list[drops->used++] = (struct prefill_drop){address, 1};
    return 0;
}

// Lists the pages of one leaf that are copied and do not count.
static int list(struct drops *drops, const struct leaf *leaf) {
    uint64_t address = (leaf->number << LEAF_BITS) * PAGE;
    int rc = 0;
    for (uint64_t left = leaf->copied & ~leaf->placed; left && rc == 0; left &= left - 1)
        rc = add(drops, address + (uint64_t)__builtin_ctzll(left) * PAGE);
    return rc;
}

static int list_outdated(struct drops *drops, struct page_map *map, uint64_t first) {
    struct leaf *leaf[BLOCK_LEAVES];
    int outdated = 0, rc = 0;
    for (uint64_t i = 0; i < BLOCK_LEAVES; i++) {
        leaf[i] = page_map_leaf(map, (first + i) << LEAF_BITS);
        if (leaf[i] != NULL)
            outdated += __builtin_popcountll(leaf[i]->copied & ~leaf[i]->placed);
    }
    for (int i = 0; outdated >= WORTH && i < BLOCK_LEAVES && rc == 0; i++)
        if (leaf[i] != NULL && (rc = list(drops, leaf[i])) == 0)
            leaf[i]->copied = leaf[i]->placed;
    return rc;
}

int store_outdated(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t start,
                   uint64_t end, struct prefill_drop **drop, uint32_t *count) {
    struct drops drops = {.used = 0};
    int rc = 0;
    pthread_mutex_lock(&s->lock);
    struct page_map *map = cold_process(s, pid);
    if (map != NULL && map->incarnation == incarnation)
        for (uint32_t i = 0; i < map->size && rc == 0; i++)
            if (map->table[i] != NULL && map->table[i]->number % BLOCK_LEAVES == 0) {
                uint64_t number = map->table[i]->number, address = (number << LEAF_BITS) * PAGE;
                if (address >= start && address < end)
                    rc = list_outdated(&drops, map, number);
            }
    pthread_mutex_unlock(&s->lock);
    *drop = drops.list;
    *count = drops.used;
    return rc;
}

static const struct image *image_of(const struct store *s, const struct page_map *map) {
    for (uint32_t i = 0; i < s->images; i++)
        if (s->image[i].pid == map->pid && s->image[i].incarnation == map->incarnation)
            return &s->image[i];
    return NULL;
}

// Pages that are not in the table do not count: placed keeps only bits of pages that are copied,
// placed, and in the table. Meanwhile ticket holds the old bits.
static void keep_table(struct page_map *map, const struct image *image) {
    for (uint32_t i = 0; i < map->size; i++)
        if (map->table[i] != NULL) {
            map->table[i]->ticket = map->table[i]->placed & map->table[i]->copied;
            map->table[i]->placed = 0;
        }
    for (uint32_t i = 0; image != NULL && i < image->extents; i++) {
        uint64_t page = image->extent[i].address / PAGE, end = page + image->extent[i].pages;
        while (page < end) {
            struct leaf *leaf = page_map_leaf(map, page);
            if (leaf != NULL)
                leaf->placed |= leaf->ticket & leaf_bits(page, end);
            page = (page | (LEAF_PAGES - 1)) + 1;
        }
    }
}

static int in_range(const struct leaf *leaf, uint64_t start, uint64_t end) {
    uint64_t address = leaf != NULL ? (leaf->number << LEAF_BITS) * PAGE : 0;
    return leaf != NULL && address >= start && address < end;
}

// Lists the pages in [start, end) that do not count. map NULL: there is no such process.
static int list_all(struct drops *drops, struct page_map *map, uint64_t start, uint64_t end) {
    int rc = 0;
    for (uint32_t i = 0; map != NULL && i < map->size && rc == 0; i++)
        if (in_range(map->table[i], start, end)) {
            rc = list(drops, map->table[i]);
            map->table[i]->copied = map->table[i]->placed;
        }
    return rc;
}

int store_settle(struct store *s, uint32_t pid, uint64_t start, uint64_t end,
                 struct prefill_drop **drop, uint32_t *count) {
    struct drops drops = {.used = 0};
    pthread_mutex_lock(&s->lock);
    struct page_map *map = cold_process(s, pid);
    if (map != NULL)
        keep_table(map, image_of(s, map));
    int rc = list_all(&drops, map, start, end);
    pthread_mutex_unlock(&s->lock);
    *drop = drops.list;
    *count = drops.used;
    return rc;
}

int store_unplanned(struct store *s, const struct plan *plan, uint32_t pid, uint64_t start,
                    uint64_t end, struct prefill_drop **drop, uint32_t *count) {
    struct drops drops = {.used = 0};
    pthread_mutex_lock(&s->lock);
    struct page_map *map = cold_process(s, pid);
    for (uint32_t i = 0; map != NULL && i < map->size; i++)
        if (in_range(map->table[i], start, end) && map->table[i]->placed)
            map->table[i]->placed &= cold_planned(plan, pid, map->table[i]);
    int rc = list_all(&drops, map, start, end);
    pthread_mutex_unlock(&s->lock);
    *drop = drops.list;
    *count = drops.used;
    return rc;
}
