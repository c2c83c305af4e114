// SPDX-License-Identifier: Apache-2.0
//
// Sizes of a page and of a block. A block is the memory of one huge page (x86-64).

#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { PAGE = 4096, BLOCK_PAGES = 512, BLOCK = BLOCK_PAGES * PAGE };

// A word has one bit for each of 64 pages, the first of them with a number that 64 divides. Returns
// the bits of the pages from page up to end, or up to the end of the word.
static inline uint64_t page_bits(uint64_t page, uint64_t end) {
    uint64_t many = end - page;
    uint64_t all = many >= 64 ? UINT64_MAX : (UINT64_C(1) << many) - 1;
    return all << page % 64;
}

static inline bool page_is_zero(const uint8_t *page) {
    uint64_t first;
    memcpy(&first, page, sizeof first);
    return first == 0 && memcmp(page, page + sizeof first, PAGE - sizeof first) == 0;
}
