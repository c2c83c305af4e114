// SPDX-License-Identifier: Apache-2.0

#include "digest.h"
#include "store.h"

void store_digest(const struct store *s, const struct image *image, uint32_t images,
                  uint64_t out[2]) {
    static const uint8_t zeros[PAGE];
    const struct page_hash zero = page_hash(zeros);
    struct digest digest = {0};
    for (uint32_t i = 0; i < images; i++)
        for (uint32_t k = 0; k < image[i].extents; k++) {
            const struct extent *e = &image[i].extent[k];
            for (uint32_t page = 0; page < e->pages; page++) {
                uint32_t slot = extent_slot(e, page);
                digest_add(&digest, image[i].pid, e->address + (uint64_t)page * PAGE,
                           slot == PAGE_ZERO ? zero : page_hash(store_content(s, slot)));
            }
        }
    out[0] = digest.low;
    out[1] = digest.high;
}
