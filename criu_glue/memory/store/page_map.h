// SPDX-License-Identifier: Apache-2.0
//
// Which slot of the store holds which page of one process: a hash table of leaves, each for 64
// pages (256 KiB of address space), so that a run of pages is one look-up per leaf, and 8 GiB
// take 9 MB.

#pragma once

#include <stdint.h>

enum { LEAF_BITS = 6, LEAF_PAGES = 1 << LEAF_BITS };

// What is known of a page; a slot's number otherwise.
enum { PAGE_UNKNOWN = 0, PAGE_ZERO = 1, PAGE_WANTED = 2, FIRST_SLOT = 3 };

struct leaf {
    uint64_t number; // address / (64 pages)
    uint32_t page[LEAF_PAGES];
    // Of what is kept for it in advance (cold.h); a bit for each page.
    uint64_t placed; // its content lies there as it is known here
    uint64_t copied; // something lies there
    uint64_t moved;  // its content lies there only
    uint64_t ticket; // of the last write to any of its pages
    uint32_t round;  // and its round
    uint32_t tries;
};

struct page_map {
    uint32_t pid;
    uint32_t incarnation;
    uint64_t known; // pages that are not unknown; kept by the store
    struct leaf **table;
    uint32_t size, used; // size: a power of two
    struct leaf *last;   // that was looked up
};

// Where the page's entry lies; NULL when there is none. page: address / PAGE.
uint32_t *page_map_find(struct page_map *map, uint64_t page);
// The same, which makes it; NULL when there is no memory.
uint32_t *page_map_need(struct page_map *map, uint64_t page);
// The leaf that has the page; NULL when there is none.
struct leaf *page_map_leaf(struct page_map *map, uint64_t page);
void page_map_clear(struct page_map *map);
