// SPDX-License-Identifier: Apache-2.0
//
// Lists of parts of an address space, as PAGEMAP_SCAN gives them.

#pragma once

#include <stddef.h>
#include <stdint.h>

// As struct page_region of linux/fs.h; categories are the kernel's, see scan.h.
struct region {
    uint64_t start, end, categories;
};

struct regions {
    struct region *at;
    size_t count, room;
    uint64_t bytes;
};

// Each returns 0 or -ENOMEM.
int regions_reserve(struct regions *list, size_t more);
// Adds it, as a part of the last one where that ends here with the same categories.
int regions_add(struct regions *list, uint64_t start, uint64_t end, uint64_t categories);

// The list as pairs of address and pages, count of them.
void regions_runs(const struct regions *list, uint64_t *out);

struct regions *regions_new(void);
void regions_clear(struct regions *list);
void regions_free(struct regions *list);
