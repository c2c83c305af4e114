// SPDX-License-Identifier: Apache-2.0
//
// What the destination has said to have: hashes of pages that need only be named.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { OFFER_PARTS = 1 << 12 };

// Ordered by hash, and found by its upper 12 bits first: hashes spread evenly.
struct offer {
    size_t first[OFFER_PARTS + 1];
    size_t count;
    uint64_t hash[];
};

// hashes: lower halves of XXH3-128, in any alignment. NULL with errno ENOMEM, or EINVAL when each is
// not larger than the one before.
struct offer *offer_new(const void *hashes, size_t count);
void offer_free(struct offer *offer);
bool offer_has(const struct offer *offer, uint64_t hash);
