// SPDX-License-Identifier: Apache-2.0

#include "sent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_SIZE = 64 };

struct sent *sent_new(void) { return calloc(1, sizeof(struct sent)); }

void sent_clear(struct sent *sent) {
    for (size_t i = 0; i < sent->size; i++)
        free(sent->table[i]);
    free(sent->table);
    *sent = (struct sent){0};
}

void sent_free(struct sent *sent) {
    sent_clear(sent);
    free(sent);
}

// Returns the place in the table where the block is, or would be.
static struct sent_block **find_place(struct sent_block **table, size_t size, uint64_t number) {
    size_t at = (number * UINT64_C(0x9e3779b97f4a7c15)) >> 20 & (size - 1);
    while (table[at] != NULL && table[at]->number != number)
        at = (at + 1) & (size - 1);
    return &table[at];
}

struct sent_block *sent_find(const struct sent *sent, uint64_t address) {
    return sent->size ? *find_place(sent->table, sent->size, address / BLOCK) : NULL;
}

static int grow(struct sent *sent) {
    size_t size = sent->size ? 2 * sent->size : FIRST_SIZE;
    struct sent_block **table = calloc(size, sizeof *table);
    if (table == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < sent->size; i++)
        if (sent->table[i] != NULL)
            *find_place(table, size, sent->table[i]->number) = sent->table[i];
    free(sent->table);
    sent->table = table;
    sent->size = size;
    return 0;
}

static struct sent_block *find_or_add(struct sent *sent, uint64_t number) {
    if (2 * (sent->used + 1) > sent->size && grow(sent) != 0)
        return NULL;
    struct sent_block **at = find_place(sent->table, sent->size, number);
    if (*at == NULL) {
        *at = calloc(1, sizeof **at);
        if (*at == NULL)
            return NULL;
        (*at)->number = number;
        sent->used++;
    }
    return *at;
}

int sent_invalidate(struct sent *sent, uint64_t start, uint64_t end) {
    while (start < end) {
        uint64_t number = start / BLOCK, next = (number + 1) * BLOCK;
        uint64_t stop = end < next ? end : next;
        struct sent_block *block = find_or_add(sent, number);
        if (block == NULL)
            return -ENOMEM;
        size_t first = sent_index(start), last = first + (stop - start) / PAGE;
        for (size_t i = first; i < last; i = (i | 63) + 1)
            block->current[i / 64] &= ~page_bits(i, last);
        start = stop;
    }
    return 0;
}

void sent_invalidate_all(struct sent *sent) {
    for (size_t i = 0; i < sent->size; i++)
        if (sent->table[i] != NULL)
            memset(sent->table[i]->current, 0, sizeof sent->table[i]->current);
}

static int forget_page(struct sent_block *block, uint64_t address, struct regions *list) {
    size_t index = sent_index(address);
    if (block->hash[index].low == 0 && block->hash[index].high == 0)
        return 0;
    sent_record(block, index, (struct sent_hash){0}, 0);
    block->current[index / 64] &= ~(UINT64_C(1) << index % 64);
    return regions_add(list, address, address + PAGE);
}

// The request comes from another host and is not trusted. So this makes no block, and leaves out
// pages that were never sent.
int sent_forget(struct sent *sent, uint64_t start, uint64_t end, struct regions *list) {
    int rc = 0;
    while (rc == 0 && start < end) {
        // next is 0 in the last block of all addresses
        uint64_t next = (start / BLOCK + 1) * BLOCK, stop = end - 1 < next - 1 ? end : next;
        struct sent_block *block = sent_find(sent, start);
        for (uint64_t at = start; rc == 0 && block != NULL && at < stop; at += PAGE)
            rc = forget_page(block, at, list);
        start = stop;
    }
    return rc;
}

struct kept { // one bit for each page of a block
    uint64_t page[BLOCK_PAGES / 64];
};

// Marks the pages of the region in kept, which has an entry for each place of the table.
static void mark_kept(const struct sent *sent, struct region region, struct kept *kept) {
    for (uint64_t at = region.start, stop; at < region.end; at = stop) {
        uint64_t number = at / BLOCK, next = (number + 1) * BLOCK;
        stop = region.end < next ? region.end : next;
        struct sent_block **place = find_place(sent->table, sent->size, number);
        size_t first = sent_index(at), last = first + (stop - at) / PAGE;
        for (size_t i = first; *place != NULL && i < last; i = (i | 63) + 1)
            kept[place - sent->table].page[i / 64] |= page_bits(i, last);
    }
}

// Forgets the pages of the block that are not kept. Returns whether a page of it is kept.
static bool forget_others(struct sent_block *block, const struct kept *kept) {
    uint64_t any = 0;
    for (size_t i = 0; i < BLOCK_PAGES / 64; i++) {
        any |= kept->page[i];
        block->current[i] &= kept->page[i];
    }
    for (size_t i = 0; any != 0 && i < BLOCK_PAGES; i++)
        if (!(kept->page[i / 64] >> i % 64 & 1))
            sent_record(block, i, (struct sent_hash){0}, 0);
    return any != 0;
}

int sent_keep(struct sent *sent, const struct regions *present) {
    if (sent->size == 0)
        return 0;
    struct kept *kept = calloc(sent->size, sizeof *kept);
    struct sent_block **table = calloc(sent->size, sizeof *table);
    if (kept == NULL || table == NULL) {
        free(kept);
        free(table);
        return -ENOMEM;
    }
    for (size_t i = 0; i < present->count; i++)
        mark_kept(sent, present->at[i], kept);
    sent->used = 0;
    for (size_t i = 0; i < sent->size; i++) {
        struct sent_block *block = sent->table[i];
        if (block != NULL && forget_others(block, &kept[i])) {
            // Without the other blocks its place in the table may be an earlier one.
            *find_place(table, sent->size, block->number) = block;
            sent->used++;
        } else {
            free(block);
        }
    }
    free(kept);
    free(sent->table);
    sent->table = table;
    return 0;
}

// Returns the word with the bit of the page. Where there is no block, no page is current.
static uint64_t current_word(const struct sent *sent, uint64_t page) {
    const struct sent_block *block = sent_find(sent, page * PAGE);
    return block != NULL ? block->current[page % BLOCK_PAGES / 64] : 0;
}

uint64_t sent_run_end(const struct sent *sent, uint64_t start, uint64_t end, bool *current) {
    uint64_t page = start / PAGE, last = end / PAGE;
    *current = current_word(sent, page) >> page % 64 & 1;
    while (page < last) {
        uint64_t word = current_word(sent, page);
        uint64_t others = (*current ? ~word : word) >> page % 64;
        if (others != 0) {
            page += (uint64_t)__builtin_ctzll(others);
            break;
        }
        page = (page | 63) + 1;
    }
    return (page < last ? page : last) * PAGE;
}
