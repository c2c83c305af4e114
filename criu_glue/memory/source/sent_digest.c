// SPDX-License-Identifier: Apache-2.0

#include "digest.h"
#include "sent.h"

#include <errno.h>

static bool is_current(const struct sent_block *block, size_t index) {
    return block->current[index / 64] >> index % 64 & 1;
}

int sent_digest(const struct sent *sent, const struct regions *present, uint32_t inner,
                uint64_t out[2]) {
    struct digest digest = {out[0], out[1]};
    const struct sent_block *block = NULL;
    for (size_t i = 0; i < present->count; i++)
        for (uint64_t at = present->at[i].start; at < present->at[i].end; at += PAGE) {
            size_t index = sent_index(at);
            if (block == NULL || block->number != at / BLOCK)
                block = sent_find(sent, at);
            if (block == NULL || !is_current(block, index))
                return -ENODATA;
            struct sent_hash hash = block->hash[index];
            digest_add(&digest, inner, at, (struct page_hash){hash.low, hash.high});
        }
    out[0] = digest.low;
    out[1] = digest.high;
    return 0;
}
