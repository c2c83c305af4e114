// SPDX-License-Identifier: Apache-2.0

#include "pagemap_flags.h"

enum { MAGICS = 8, FLAGS_FIELD = 4, LAZY = 2, VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

struct cursor {
    uint8_t *at, *end;
};

static int varint(struct cursor *c, uint64_t *value) {
    *value = 0;
    for (int shift = 0; c->at < c->end && shift < 64; shift += 7) {
        uint8_t byte = *c->at++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return 0;
    }
    return -1;
}

static int skip(struct cursor *c, uint64_t bytes) {
    if (bytes > (uint64_t)(c->end - c->at))
        return -1;
    c->at += bytes;
    return 0;
}

// Clears the bit in the flags of one entry, in place. The flags keep their length.
static int clear_entry(struct cursor *c) {
    while (c->at < c->end) {
        uint64_t key, value;
        if (varint(c, &key) != 0)
            return -1;
        uint8_t *flags = c->at;
        int rc = -1;
        switch (key & 7) {
        case VARINT:
            rc = varint(c, &value);
            if (rc == 0 && key >> 3 == FLAGS_FIELD)
                *flags &= (uint8_t)~LAZY;
            break;
        case FIXED64:
            rc = skip(c, 8);
            break;
        case BYTES:
            rc = varint(c, &value) != 0 ? -1 : skip(c, value);
            break;
        case FIXED32:
            rc = skip(c, 4);
            break;
        }
        if (rc != 0)
            return -1;
    }
    return 0;
}

int pagemap_clear_lazy(uint8_t *raw, size_t length) {
    struct cursor all = {raw, raw + length};
    if (skip(&all, MAGICS) != 0)
        return -1;
    for (int first = 1; all.at < all.end; first = 0) {
        if (all.end - all.at < 4)
            return -1;
        uint32_t size = all.at[0] | all.at[1] << 8 | all.at[2] << 16 | (uint32_t)all.at[3] << 24;
        struct cursor one = {all.at + 4, NULL};
        all.at += 4;
        if (skip(&all, size) != 0)
            return -1;
        one.end = all.at;
        if (!first &&
            clear_entry(&one) != 0) // the first one is the number of the image of the pages
            return -1;
    }
    return 0;
}
