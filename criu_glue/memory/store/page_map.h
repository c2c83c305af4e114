// SPDX-License-Identifier: Apache-2.0
//
// Finds the slot of the store that holds a page of one process. It is a hash table of leaves. A
// leaf is for 64 pages (256 KiB of address space), so a run of pages needs one look-up per leaf.
// The table for 8 GiB takes 9 MB.

#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { LEAF_BITS = 6, LEAF_PAGES = 1 << LEAF_BITS };

// Values of a page's entry. All values from FIRST_SLOT on mean the slot that holds the page.
enum { PAGE_UNKNOWN = 0, PAGE_ZERO = 1, PAGE_WANTED = 2, FIRST_SLOT = 3 };

struct leaf {
    uint64_t number; // address / (64 pages)
    uint32_t page[LEAF_PAGES];
    // What the early CRIU holds of these pages (cold.h); one bit for each page.
    uint64_t preplaced; // the early CRIU holds the content that the store knows
    uint64_t copied;    // the early CRIU holds some content, which may be outdated
    uint64_t evicted;   // only the early CRIU holds the content; the slot is empty
    uint64_t ticket;    // the ticket of the last write to one of the pages
    uint32_t round;     // the round of that write
    uint32_t copies;    // how often a page of this leaf was copied into the early CRIU
};

struct page_map {
    uint32_t pid;
    uint32_t incarnation;
    bool reverted;  // its pages are a generation's; the next chunk names its present incarnation
    uint64_t known; // pages whose entry is not PAGE_UNKNOWN; the store updates this
    struct leaf **table;
    uint32_t size, used; // size is a power of two
    struct leaf *last;   // the result of the last look-up
};

// In all three functions, page is address / PAGE.
// Returns a pointer to the page's entry, or NULL when the map has no leaf for the page.
uint32_t *page_map_find(struct page_map *map, uint64_t page);
// Returns a pointer to the page's entry and makes the leaf if necessary. NULL without memory.
uint32_t *page_map_insert(struct page_map *map, uint64_t page);
// Returns the leaf of the page, or NULL when there is none.
struct leaf *page_map_leaf(struct page_map *map, uint64_t page);
void page_map_clear(struct page_map *map);
