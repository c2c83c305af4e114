// SPDX-License-Identifier: Apache-2.0

#include "offer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static size_t part_of(uint64_t hash) { return hash / (UINT64_MAX / OFFER_PARTS + 1); }

struct offer *offer_new(const void *hashes, size_t count) {
    struct offer *offer = malloc(sizeof *offer + count * sizeof offer->hash[0]);
    if (offer == NULL)
        return NULL;
    offer->count = count;
    memcpy(offer->hash, hashes, count * sizeof offer->hash[0]);
    size_t part = 0;
    for (size_t i = 0; i < count; i++) {
        if (i > 0 && offer->hash[i] <= offer->hash[i - 1]) {
            free(offer);
            errno = EINVAL;
            return NULL;
        }
        while (part <= part_of(offer->hash[i]))
            offer->first[part++] = i;
    }
    while (part <= OFFER_PARTS)
        offer->first[part++] = count;
    return offer;
}

void offer_free(struct offer *offer) { free(offer); }

bool offer_has(const struct offer *offer, uint64_t hash) {
    size_t low = offer->first[part_of(hash)], high = offer->first[part_of(hash) + 1];
    const size_t end = high;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (offer->hash[middle] < hash)
            low = middle + 1;
        else
            high = middle;
    }
    return low < end && offer->hash[low] == hash;
}
