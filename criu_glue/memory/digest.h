// SPDX-License-Identifier: Apache-2.0
//
// The digest of a capsule's memory at a freeze. The source computes it from the hashes of what it
// has sent (sent.h), the store from the pages that it keeps. If both are equal, the store has all
// pages with the content that the source has read.
//
//     pages   all pages that the tables of all processes name, each once; pages of zeros too
//     hash    XXH3-128 of the page's 4096 bytes, as two halves of 64 bits. If both are 0, the high
//             one is 1, since sent.h takes 0 for "nothing was sent". A page of zeros is no special
//             case: its hash is that of 4096 zeros, as pull.c records it.
//     mix     XXH3-128 of 32 bytes: inner pid, address, low half and high half of the hash, each
//             as 64 bits, little endian
//     digest  the sum of the low halves of all mixes and the sum of the high halves, each modulo
//             2^64. No pages: both are 0.
//
// A sum does not depend on the order. So threads can make parts of it, and one that is kept up to
// date can subtract a page's mix. As bytes, a digest is its low sum, then its high sum, little
// endian. It finds faults, no attacks: the hash is not cryptographic.

#pragma once

#include "page.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

struct page_hash {
    uint64_t low, high; // never both 0
};

struct digest {
    uint64_t low, high;
};

static inline struct page_hash page_hash(const uint8_t *page) {
    XXH128_hash_t hash = XXH3_128bits(page, PAGE);
    return (struct page_hash){hash.low64, hash.high64 | (hash.low64 == 0 && hash.high64 == 0)};
}

// Adds one page. pid is the pid in the capsule, address that of the page's first byte.
static inline void digest_add(struct digest *digest, uint32_t pid, uint64_t address,
                              struct page_hash hash) {
    uint64_t mixed[] = {pid, address, hash.low, hash.high};
    XXH128_hash_t mix = XXH3_128bits(mixed, sizeof mixed);
    digest->low += mix.low64;
    digest->high += mix.high64;
}
