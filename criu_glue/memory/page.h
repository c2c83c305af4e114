// SPDX-License-Identifier: Apache-2.0
//
// Sizes of a page and of a block. A block is the memory of one huge page (x86-64).

#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { PAGE = 4096, BLOCK_PAGES = 512, BLOCK = BLOCK_PAGES * PAGE };

static inline bool page_is_zero(const uint8_t *page) {
    uint64_t first;
    memcpy(&first, page, sizeof first);
    return first == 0 && memcmp(page, page + sizeof first, PAGE - sizeof first) == 0;
}
