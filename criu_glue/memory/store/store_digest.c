// SPDX-License-Identifier: Apache-2.0
//
// Computes the digest (digest.h) of images from the content of their pages.
//
// The store never writes into a slot of a kept generation. So if a page lies in the same slot in two
// generations, it has the same content in both. The digest of one generation therefore follows from
// the digest of the other one and from the pages that do not lie in the same slot.

#include "digest.h"
#include "store.h"

// A position in the extents of one process, and how many pages of the present one are left.
struct cursor {
    const struct extent *next, *end;
    uint32_t page;
};

static struct cursor begin(const struct image *image) {
    if (image == NULL)
        return (struct cursor){0};
    return (struct cursor){image->extent, image->extent + image->extents, 0};
}

static uint64_t address_of(const struct cursor *at) {
    return at->next == at->end ? UINT64_MAX : at->next->address + (uint64_t)at->page * PAGE;
}

static uint32_t left(const struct cursor *at) {
    return at->next == at->end ? 0 : at->next->pages - at->page;
}

static void skip(struct cursor *at, uint32_t pages) {
    at->page += pages;
    if (pages > 0 && at->page == at->next->pages) {
        at->next++;
        at->page = 0;
    }
}

// The pages of two images of one process that do not lie in the same slot in both.
struct changes {
    bool count; // only count the pages
    uint64_t pages;
    struct digest gone, come;
};

// Takes the next pages as changed, and goes behind them.
static void take(const struct store *s, uint32_t pid, struct cursor *at, uint32_t pages,
                 struct changes *changes, struct digest *sum) {
    static const uint8_t zeros[PAGE];
    const struct page_hash zero = changes->count ? (struct page_hash){0} : page_hash(zeros);
    changes->pages += pages;
    for (uint32_t i = 0; i < pages && !changes->count; i++) {
        uint32_t slot = extent_slot(at->next, at->page + i);
        digest_add(sum, pid, at->next->address + (uint64_t)(at->page + i) * PAGE,
                   slot == PAGE_ZERO ? zero : page_hash(store_content(s, slot)));
    }
    skip(at, pages);
}

static uint32_t fewer(uint64_t a, uint64_t b) { return (uint32_t)(a < b ? a : b); }

static void compare(const struct store *s, uint32_t pid, const struct image *before,
                    const struct image *after, struct changes *changes) {
    struct cursor old = begin(before), new = begin(after);
    while (left(&old) > 0 || left(&new) > 0) {
        uint64_t a = address_of(&old), b = address_of(&new);
        if (a < b) {
            take(s, pid, &old, fewer(left(&old), (b - a) / PAGE), changes, &changes->gone);
        } else if (b < a) {
            take(s, pid, &new, fewer(left(&new), (a - b) / PAGE), changes, &changes->come);
        } else {
            uint32_t both = fewer(left(&old), left(&new));
            if (extent_slot(old.next, old.page) == extent_slot(new.next, new.page)) {
                skip(&old, both);
                skip(&new, both);
            } else {
                take(s, pid, &old, both, changes, &changes->gone);
                take(s, pid, &new, both, changes, &changes->come);
            }
        }
    }
}

static const struct image *of_process(const struct image *image, uint32_t images, uint32_t pid) {
    for (uint32_t i = 0; i < images; i++)
        if (image[i].pid == pid)
            return &image[i];
    return NULL;
}

static struct changes compare_all(const struct store *s, const struct image *before,
                                  uint32_t befores, const struct image *image, uint32_t images,
                                  bool count) {
    struct changes changes = {.count = count};
    for (uint32_t i = 0; i < images; i++)
        compare(s, image[i].pid, of_process(before, befores, image[i].pid), &image[i], &changes);
    for (uint32_t i = 0; i < befores; i++)
        if (of_process(image, images, before[i].pid) == NULL)
            compare(s, before[i].pid, &before[i], NULL, &changes);
    return changes;
}

bool store_digest_change(const struct store *s, const struct image *before, uint32_t befores,
                         const struct image *image, uint32_t images, uint64_t out[2]) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < images; i++)
        all += image[i].pages;
    if (compare_all(s, before, befores, image, images, true).pages > all)
        return false;
    struct changes changes = compare_all(s, before, befores, image, images, false);
    out[0] = changes.come.low - changes.gone.low;
    out[1] = changes.come.high - changes.gone.high;
    return true;
}

void store_digest(const struct store *s, const struct image *image, uint32_t images,
                  uint64_t out[2]) {
    struct digest all = compare_all(s, NULL, 0, image, images, false).come;
    out[0] = all.low;
    out[1] = all.high;
}
