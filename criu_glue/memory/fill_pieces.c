// SPDX-License-Identifier: Apache-2.0

#include "fill.h"

#include <stdlib.h>
#include <string.h>

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
    list->to_do += piece.state != PIECE_DONE;
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

// What of the extent is not placed.
static int add_rest(struct pieces *list, struct extent e, struct page_map *map,
                    const struct plan *plan, uint64_t *placed) {
    struct extent next = {e.address, 0, e.slot};
    uint64_t page = e.address / PAGE, there = 0;
    for (uint32_t i = 0; i < e.pages; i++, page++) {
        if (i == 0 || page % LEAF_PAGES == 0)
            there = cold_placed(plan, map, page);
        if (!(there >> page % LEAF_PAGES & 1)) {
            next.pages++;
            continue;
        }
        ++*placed;
        if (add_all(list, next) != 0)
            return -1;
        next = (struct extent){(page + 1) * PAGE, 0, e.slot + i + 1};
    }
    return add_all(list, next);
}

int pieces_of(struct pieces *list, const struct image *image, struct page_map *map,
              const struct plan *plan, uint64_t *placed) {
    *list = (struct pieces){.used = 0};
    for (uint32_t i = 0; i < image->extents; i++) {
        struct extent e = image->extent[i];
        if (e.slot < FIRST_SLOT) // what is zero the kernel has
            continue;
        if ((plan == NULL ? add_all(list, e) : add_rest(list, e, map, plan, placed)) != 0)
            return -1;
    }
    return 0;
}

int pieces_copy(struct pieces *list, const struct pieces *from) {
    *list = (struct pieces){.used = 0};
    for (uint32_t i = 0; i < from->used; i++)
        if (from->piece[i].state != PIECE_DONE && add(list, from->piece[i]) != 0)
            return -1;
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

// The part of a piece that lies in [start, end).
static struct piece part(const struct piece *p, uint64_t start, uint64_t end) {
    uint64_t from = p->address > start ? p->address : start;
    uint64_t to = end_of(p) < end ? end_of(p) : end;
    struct piece cut = *p;
    cut.pages = from < to ? (uint16_t)((to - from) / PAGE) : 0;
    cut.slot += (uint32_t)((from - p->address) / PAGE);
    cut.address = from;
    return cut;
}

static int by_address(const void *a, const void *b) {
    uint64_t one = ((const struct piece *)a)->address, other = ((const struct piece *)b)->address;
    return one < other ? -1 : one > other;
}

// Keeps what lies outside [start, end), and what lies inside shifted by to - start, if it is kept.
static int rearrange(struct pieces *list, uint64_t start, uint64_t end, const uint64_t *to) {
    struct pieces fresh = {.used = 0};
    int rc = 0;
    for (uint32_t i = 0; i < list->used && rc == 0; i++) {
        const struct piece *p = &list->piece[i];
        if (p->state == PIECE_DONE)
            continue;
        struct piece before = part(p, 0, start), inside = part(p, start, end),
                     behind = part(p, end, UINT64_MAX);
        if (before.pages > 0)
            rc |= add(&fresh, before);
        if (inside.pages > 0 && to != NULL) {
            inside.address += *to - start;
            rc |= add(&fresh, inside);
        }
        if (behind.pages > 0)
            rc |= add(&fresh, behind);
    }
    if (rc != 0) {
        free(fresh.piece);
        return -1;
    }
    if (to != NULL)
        qsort(fresh.piece, fresh.used, sizeof *fresh.piece, by_address);
    free(list->piece);
    *list = fresh;
    return 0;
}

int pieces_cut(struct pieces *list, uint64_t start, uint64_t end) {
    if (list->to_do == 0)
        return 0;
    return rearrange(list, start, end, NULL);
}

int pieces_move(struct pieces *list, uint64_t from, uint64_t to, uint64_t length) {
    if (list->to_do == 0)
        return 0;
    // What was there is no more: the kernel has told of its unmapping, or it was never there.
    if (pieces_cut(list, to, to + length) != 0)
        return -1;
    return rearrange(list, from, from + length, &to);
}
