// SPDX-License-Identifier: Apache-2.0
//
// Lists of parts of an address space, in the form in which PAGEMAP_SCAN writes them.

#pragma once

#include <stddef.h>
#include <stdint.h>

// The same as struct page_region of linux/fs.h. categories: bits of the kernel, see scan.h.
struct region {
    uint64_t start, end, categories;
};

struct regions {
    struct region *at;
    size_t count, room;
    uint64_t bytes;
};

// The next two functions return 0 or -ENOMEM.
int regions_reserve(struct regions *list, size_t more);
// Adds a region without categories. It extends the last one if that ends at start.
int regions_add(struct regions *list, uint64_t start, uint64_t end);

// Writes the list as count pairs of (address, pages).
void regions_runs(const struct regions *list, uint64_t *out);

struct regions *regions_new(void);
void regions_clear(struct regions *list);
void regions_free(struct regions *list);
