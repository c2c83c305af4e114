// SPDX-License-Identifier: Apache-2.0

#include "page_map.h"

#include <stdlib.h>

static struct leaf **find_place(const struct page_map *map, uint64_t number) {
    uint32_t at = (uint32_t)(number * UINT64_C(0x9E3779B97F4A7C15) >> 32) & (map->size - 1);
    while (map->table[at] != NULL && map->table[at]->number != number)
        at = (at + 1) & (map->size - 1);
    return &map->table[at];
}

static int grow(struct page_map *map) {
    struct page_map larger = {.size = map->size ? map->size * 2 : 64};
    larger.table = calloc(larger.size, sizeof *larger.table);
    if (larger.table == NULL)
        return -1;
    for (uint32_t i = 0; i < map->size; i++)
        if (map->table[i] != NULL)
            *find_place(&larger, map->table[i]->number) = map->table[i];
    free(map->table);
    map->table = larger.table;
    map->size = larger.size;
    return 0;
}

struct leaf *page_map_leaf(struct page_map *map, uint64_t page) {
    uint64_t number = page >> LEAF_BITS;
    if (map->last == NULL || map->last->number != number) {
        struct leaf *found = map->size ? *find_place(map, number) : NULL;
        if (found == NULL)
            return NULL;
        map->last = found;
    }
    return map->last;
}

uint32_t *page_map_find(struct page_map *map, uint64_t page) {
    struct leaf *leaf = page_map_leaf(map, page);
    return leaf == NULL ? NULL : &leaf->page[page & (LEAF_PAGES - 1)];
}

uint32_t *page_map_insert(struct page_map *map, uint64_t page) {
    uint32_t *found = page_map_find(map, page);
    if (found != NULL)
        return found;
    if ((map->used + 1) * UINT64_C(2) > map->size && grow(map) != 0)
        return NULL;
    struct leaf *leaf = calloc(1, sizeof *leaf);
    if (leaf == NULL)
        return NULL;
    leaf->number = page >> LEAF_BITS;
    *find_place(map, leaf->number) = leaf;
    map->used++;
    map->last = leaf;
    return &leaf->page[page & (LEAF_PAGES - 1)];
}

void page_map_clear(struct page_map *map) {
    for (uint32_t i = 0; i < map->size; i++)
        free(map->table[i]);
    free(map->table);
    map->table = NULL;
    map->last = NULL;
    map->size = map->used = 0;
    map->known = 0;
}
