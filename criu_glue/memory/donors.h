// SPDX-License-Identifier: Apache-2.0
//
// Pages that this host has anyway, in the memory of processes that run on here. They are known by
// their hash, and whoever says that a page has the same need not send it. The processes go on
// writing theirs, so what is found is looked at once more.

#pragma once

#include <stdbool.h>
#include <stdint.h>

struct donor {      // a page
    uint64_t hash;  // the lower half
    uint64_t where; // source (20 bits), address / PAGE (44 bits)
};

enum { DONOR_SOURCES = 1 << 20, DONOR_PAGE_BITS = 44 };

struct donors {
    struct donor *donor;
    uint64_t used, most; // sorted by hash once donors_settle was called
    uint64_t room;
    int *source; // /proc/PID/mem of each
    uint32_t sources;
};

// most: pages. NULL when there is no memory.
struct donors *donors_new(uint64_t most);
void donors_free(struct donors *d);

// A source; its number, or -1. memory: its /proc/PID/mem, of which a copy is made.
int64_t donors_add_process(struct donors *d, int memory);
// What is in [start, end) of a process's memory; pagemap: /proc/PID/pagemap. Pages that were taken
// in, or -1 when it has ended.
int64_t donors_take(struct donors *d, int64_t source, int pagemap, uint64_t start, uint64_t end);
// Nothing is added any more; how many different pages there are.
uint64_t donors_settle(struct donors *d);
// Their hashes' lower halves, ordered.
void donors_offer(const struct donors *d, uint64_t *hashes);
// The page of that hash; false when it is not here, or no longer.
bool donors_fetch(const struct donors *d, const uint64_t hash[2], uint8_t *page);
