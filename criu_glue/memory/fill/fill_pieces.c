// SPDX-License-Identifier: Apache-2.0

#include "fill.h"

#include <stdlib.h>

static int add(struct pieces *list, struct piece piece) {
    if (list->used == list->room) {
        uint32_t room = list->room + list->room / 2 + 64;
        struct piece *larger = realloc(list->piece, room * sizeof *larger);
        if (larger == NULL)
            return -1;
        list->piece = larger;
        list->room = room;
    }
    list->piece[list->used++] = piece;
    list->to_do++;
    return 0;
}

static int add_all(struct pieces *list, struct extent e) {
    while (e.pages > 0) {
        uint16_t pages = e.pages < PIECE_PAGES ? (uint16_t)e.pages : PIECE_PAGES;
        if (add(list, (struct piece){e.address, e.slot, pages, PIECE_TO_DO}) != 0)
            return -1;
        e.address += (uint64_t)pages * PAGE;
        e.slot += pages;
        e.pages -= pages;
    }
    return 0;
}

// Adds the pages of the extent that are not placed.
static int add_rest(struct pieces *list, struct extent e, struct page_map *map,
                    const struct plan *plan, uint64_t *preplaced) {
    struct extent next = {e.address, 0, e.slot};
    uint64_t page = e.address / PAGE, preplaced_bits = 0;
    for (uint32_t i = 0; i < e.pages; i++, page++) {
        if (i == 0 || page % LEAF_PAGES == 0)
            preplaced_bits = cold_preplaced(plan, map, page);
        if (!(preplaced_bits >> page % LEAF_PAGES & 1)) {
            next.pages++;
            continue;
        }
        ++*preplaced;
        if (add_all(list, next) != 0)
            return -1;
        next = (struct extent){(page + 1) * PAGE, 0, e.slot + i + 1};
    }
    return add_all(list, next);
}

int pieces_of(struct pieces *list, const struct image *image, struct page_map *map,
              const struct plan *plan, uint64_t *preplaced) {
    *list = (struct pieces){.used = 0};
    for (uint32_t i = 0; i < image->extents; i++) {
        struct extent e = image->extent[i];
        if (e.slot < FIRST_SLOT) // the kernel supplies pages of zeros
            continue;
        if ((plan == NULL ? add_all(list, e) : add_rest(list, e, map, plan, preplaced)) != 0)
            return -1;
    }
    return 0;
}

static uint64_t end_of(const struct piece *p) { return p->address + (uint64_t)p->pages * PAGE; }

struct piece *pieces_find(struct pieces *list, uint64_t address) {
    uint32_t low = 0, high = list->used;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        struct piece *p = &list->piece[middle];
        if (end_of(p) <= address)
            low = middle + 1;
        else if (p->address > address)
            high = middle;
        else
            return p->state == PIECE_TO_DO ? p : NULL;
    }
    return NULL;
}
