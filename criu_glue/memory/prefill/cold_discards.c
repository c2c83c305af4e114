// SPDX-License-Identifier: Apache-2.0
//
// Lists the pages in the early CRIU that must be freed: pages that are outdated, that are not in
// the table, or that no mapping of the plan moves.

#include "cold.h"

#include <stdlib.h>

enum { WORTH = BLOCK_PAGES / 2 }; // fewer pages give the host too little memory back

static int add(struct discards *discards, uint64_t address) {
    struct prefill_discard *last = discards->used ? &discards->list[discards->used - 1] : NULL;
    if (last != NULL && last->address + last->pages * PAGE == address) {
        last->pages++;
        return 0;
    }
    if (discards->used == discards->room) {
        uint32_t room = discards->room * 2 + 256;
        struct prefill_discard *larger = realloc(discards->list, room * sizeof *larger);
        if (larger == NULL)
            return -1;
        discards->list = larger;
        discards->room = room;
    }
    discards->list[discards->used++] = (struct prefill_discard){address, 1};
    return 0;
}

// Lists the pages of one leaf that are copied and do not count.
static int list_leaf(struct discards *discards, const struct leaf *leaf) {
    uint64_t address = (leaf->number << LEAF_BITS) * PAGE;
    int rc = 0;
    for (uint64_t left = leaf->copied & ~leaf->preplaced; left && rc == 0; left &= left - 1)
        rc = add(discards, address + (uint64_t)__builtin_ctzll(left) * PAGE);
    return rc;
}

static int list_block(struct discards *discards, struct page_map *map, uint64_t first) {
    struct leaf *leaf[BLOCK_LEAVES];
    int outdated = 0, rc = 0;
    for (uint64_t i = 0; i < BLOCK_LEAVES; i++) {
        leaf[i] = page_map_leaf(map, (first + i) << LEAF_BITS);
        if (leaf[i] != NULL)
            outdated += __builtin_popcountll(leaf[i]->copied & ~leaf[i]->preplaced);
    }
    for (int i = 0; outdated >= WORTH && i < BLOCK_LEAVES && rc == 0; i++)
        if (leaf[i] != NULL && (rc = list_leaf(discards, leaf[i])) == 0)
            leaf[i]->copied = leaf[i]->preplaced;
    return rc;
}

static bool in_range(const struct leaf *leaf, uint64_t start, uint64_t end) {
    uint64_t address = leaf != NULL ? (leaf->number << LEAF_BITS) * PAGE : 0;
    return leaf != NULL && address >= start && address < end;
}

int store_list_outdated(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t start,
                        uint64_t end, struct discards *discards) {
    int rc = 0;
    pthread_mutex_lock(&s->lock);
    struct page_map *map = store_find_process(s, pid);
    if (map != NULL && map->incarnation == incarnation)
        for (uint32_t i = 0; i < map->size && rc == 0; i++)
            if (in_range(map->table[i], start, end) && map->table[i]->number % BLOCK_LEAVES == 0)
                rc = list_block(discards, map, map->table[i]->number);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

// Pages that are not in the table do not count: preplaced keeps only bits of pages that are copied,
// placed, and in the table. Meanwhile ticket holds the old bits.
static void keep_listed(const struct store *s, struct page_map *map) {
    const struct image *image = store_find_image(s, map->pid);
    if (image != NULL && image->incarnation != map->incarnation)
        image = NULL;
    for (uint32_t i = 0; i < map->size; i++)
        if (map->table[i] != NULL) {
            map->table[i]->ticket = map->table[i]->preplaced & map->table[i]->copied;
            map->table[i]->preplaced = 0;
        }
    for (uint32_t i = 0; image != NULL && i < image->extents; i++) {
        uint64_t page = image->extent[i].address / PAGE, end = page + image->extent[i].pages;
        for (; page < end; page = (page | (LEAF_PAGES - 1)) + 1) {
            struct leaf *leaf = page_map_leaf(map, page);
            if (leaf != NULL)
                leaf->preplaced |= leaf->ticket & page_bits(page, end);
        }
    }
}

// Lists the pages in [start, end) that do not count. map NULL: there is no such process.
static int list_all(struct discards *discards, struct page_map *map, uint64_t start, uint64_t end) {
    int rc = 0;
    for (uint32_t i = 0; map != NULL && i < map->size && rc == 0; i++)
        if (in_range(map->table[i], start, end)) {
            rc = list_leaf(discards, map->table[i]);
            map->table[i]->copied = map->table[i]->preplaced;
        }
    return rc;
}

int store_apply_table(struct store *s, uint32_t pid, uint64_t start, uint64_t end,
                      struct discards *discards) {
    pthread_mutex_lock(&s->lock);
    struct page_map *map = store_find_process(s, pid);
    if (map != NULL)
        keep_listed(s, map);
    int rc = list_all(discards, map, start, end);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int store_apply_plan(struct store *s, const struct plan *plan, uint32_t pid, uint64_t start,
                     uint64_t end, struct discards *discards) {
    pthread_mutex_lock(&s->lock);
    struct page_map *map = store_find_process(s, pid);
    for (uint32_t i = 0; map != NULL && i < map->size; i++)
        if (in_range(map->table[i], start, end) && map->table[i]->preplaced)
            map->table[i]->preplaced &= cold_planned(plan, pid, map->table[i]);
    int rc = list_all(discards, map, start, end);
    pthread_mutex_unlock(&s->lock);
    return rc;
}
