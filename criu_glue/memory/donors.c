// SPDX-License-Identifier: Apache-2.0

#define XXH_INLINE_ALL
#include "donors.h"

#include "page.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

// Documentation/admin-guide/mm/pagemap.rst
#define PRESENT (UINT64_C(1) << 63)
#define OF_FILE (UINT64_C(1) << 61)

enum { ENTRIES = 512, AT_ONCE = 64 }; // pages looked up, and pages read, by one call

struct donors *donors_new(uint64_t most) {
    struct donors *d = calloc(1, sizeof *d);
    if (d != NULL)
        d->most = most;
    return d;
}

void donors_free(struct donors *d) {
    for (uint32_t i = 0; i < d->sources; i++)
        close(d->source[i]);
    free(d->source);
    free(d->donor);
    free(d);
}

int64_t donors_add_process(struct donors *d, int memory) {
    if (d->sources == DONOR_SOURCES)
        return -1;
    int *larger = realloc(d->source, (d->sources + 1) * sizeof *larger);
    if (larger == NULL)
        return -1;
    d->source = larger;
    int own = fcntl(memory, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return -1;
    larger[d->sources] = own;
    return d->sources++;
}

static bool add(struct donors *d, int64_t source, uint64_t number, const uint8_t *page) {
    if (page_is_zero(page)) // nobody asks for it
        return true;
    if (d->used == d->most)
        return false;
    if (d->used == d->room) {
        uint64_t room = d->room * 2 + 4096;
        struct donor *larger = realloc(d->donor, room * sizeof *larger);
        if (larger == NULL)
            return false;
        d->donor = larger;
        d->room = room;
    }
    uint64_t where = (uint64_t)source << DONOR_PAGE_BITS | number;
    d->donor[d->used++] = (struct donor){XXH3_128bits(page, PAGE).low64, where};
    return true;
}

// Read by /proc/PID/mem: process_vm_readv(2) pins pages, and gives a process that shares them with
// its parent a copy of its own of each.
static int64_t take_run(struct donors *d, int64_t source, uint64_t start, uint64_t pages) {
    uint8_t buffer[AT_ONCE * PAGE];
    int64_t taken = 0;
    for (uint64_t done = 0; done < pages;) {
        uint64_t count = pages - done < AT_ONCE ? pages - done : AT_ONCE;
        ssize_t n = pread(d->source[source], buffer, count * PAGE, (off_t)(start + done * PAGE));
        if (n < PAGE) // unmapped meanwhile; or the process has ended, and then all the rest is
            return n == 0 ? -1 : taken;
        for (ssize_t i = 0; i < n / PAGE; i++, done++, taken++)
            if (!add(d, source, start / PAGE + done, buffer + i * PAGE))
                return taken;
    }
    return taken;
}

int64_t donors_take(struct donors *d, int64_t source, int pagemap, uint64_t start, uint64_t end) {
    uint64_t entry[ENTRIES];
    int64_t taken = 0;
    for (uint64_t at = start; at < end;) {
        uint64_t most = (end - at) / PAGE < ENTRIES ? (end - at) / PAGE : ENTRIES;
        ssize_t n = pread(pagemap, entry, most * sizeof *entry, (off_t)(at / PAGE * sizeof *entry));
        if (n <= 0)
            return -1;
        uint64_t found = (uint64_t)n / sizeof *entry, i = 0;
        while (i < found) {
            uint64_t first = i;
            while (i < found && (entry[i] & (PRESENT | OF_FILE)) == PRESENT)
                i++;
            int64_t more = i > first ? take_run(d, source, at + first * PAGE, i - first) : 0;
            if (more < 0)
                return -1;
            taken += more;
            i += i == first || i < found;
        }
        at += found * PAGE;
    }
    return taken;
}

static int by_hash(const void *a, const void *b) {
    uint64_t one = ((const struct donor *)a)->hash, other = ((const struct donor *)b)->hash;
    return one < other ? -1 : one > other;
}

uint64_t donors_settle(struct donors *d) {
    uint64_t left = 0;
    if (d->used > 0)
        qsort(d->donor, d->used, sizeof *d->donor, by_hash);
    for (uint64_t i = 0; i < d->used; i++)
        if (i == 0 || d->donor[i].hash != d->donor[left - 1].hash)
            d->donor[left++] = d->donor[i];
    d->used = left;
    return left;
}

void donors_offer(const struct donors *d, uint64_t *hashes) {
    for (uint64_t i = 0; i < d->used; i++)
        hashes[i] = d->donor[i].hash;
}

bool donors_fetch(const struct donors *d, const uint64_t hash[2], uint8_t *page) {
    uint64_t low = 0, high = d->used;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (d->donor[middle].hash < hash[0])
            low = middle + 1;
        else
            high = middle;
    }
    if (low == d->used || d->donor[low].hash != hash[0])
        return false;
    int memory = d->source[d->donor[low].where >> DONOR_PAGE_BITS];
    uint64_t number = d->donor[low].where & ((UINT64_C(1) << DONOR_PAGE_BITS) - 1);
    if (pread(memory, page, PAGE, (off_t)(number * PAGE)) != PAGE)
        return false;
    XXH128_hash_t seen = XXH3_128bits(page, PAGE);
    return seen.low64 == hash[0] && seen.high64 == hash[1];
}
