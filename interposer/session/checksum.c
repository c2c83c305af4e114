/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Four lanes take every fourth word each. A word is multiplied and rotated in, so the order of the
 * bytes counts, and a processor can do four words at once. In the end the lanes are mixed. The step
 * and its constants are those of xxHash's 64-bit form, which is known to disperse well.
 */
#include "checksum.h"

#include "device_session.h"

#include <string.h>

#define PRIME_1 0x9e3779b185ebca87u
#define PRIME_2 0xc2b2ae3d27d4eb4fu
#define PRIME_3 0x165667b19e3779f9u

static uint64_t rotated(uint64_t word, unsigned by) { return word << by | word >> (64 - by); }

static uint64_t step(uint64_t lane, uint64_t word) {
    return rotated(lane + word * PRIME_2, 31) * PRIME_1;
}

struct checksum checksum_begin(uint64_t size, uint64_t samples) {
    struct checksum sum;
    for (unsigned i = 0; i < 4; i++)
        sum.lanes[i] = step(step(i * PRIME_3 + 1, size), samples);
    return sum;
}

void checksum_add(struct checksum *sum, const void *bytes, size_t length) {
    const char *at = bytes;
    uint64_t words[4], lanes[4];
    memcpy(lanes, sum->lanes, sizeof lanes);
    for (; length >= sizeof words; at += sizeof words, length -= sizeof words) {
        memcpy(words, at, sizeof words);
        for (unsigned i = 0; i < 4; i++)
            lanes[i] = step(lanes[i], words[i]);
    }
    if (length > 0) {
        memset(words, 0, sizeof words);
        memcpy(words, at, length);
        for (unsigned i = 0; i < 4; i++)
            lanes[i] = step(lanes[i], words[i]);
    }
    memcpy(sum->lanes, lanes, sizeof lanes);
}

uint64_t checksum_of(const struct checksum *sum) {
    uint64_t all = 0;
    for (unsigned i = 0; i < 4; i++)
        all = (rotated(all, 27) ^ step(0, sum->lanes[i])) * PRIME_1 + PRIME_3;
    all = (all ^ all >> 33) * PRIME_2;
    all = (all ^ all >> 29) * PRIME_3;
    return all ^ all >> 32;
}

uint64_t checksum_pieces(uint64_t size, uint64_t samples) {
    return samples > size / LIVESHIFT_DEVICE_SAMPLE ? 0 : samples;
}

uint64_t checksum_piece(uint64_t size, uint64_t pieces, uint64_t which) {
    uint64_t last = size - LIVESHIFT_DEVICE_SAMPLE;
    if (which + 1 >= pieces)
        return last;
    /* This counts in whole pieces, so that no product gets large. */
    return last / LIVESHIFT_DEVICE_SAMPLE * which / (pieces - 1) * LIVESHIFT_DEVICE_SAMPLE;
}
