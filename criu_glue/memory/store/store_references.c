// SPDX-License-Identifier: Apache-2.0
//
// References: pages of a forked process whose content the source did not send, since it had sent
// the same content for the parent. The parent's page may have changed meanwhile, or may not have
// come yet, so the hash decides whether it is the right page. If it is not, the page is noted as
// wanted, and the destination may ask for it. Equal pages lie in one slot until one is written.

#define XXH_INLINE_ALL
#include "store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static bool has_hash(const uint8_t *page, const uint64_t hash[2]) {
    XXH128_hash_t seen = XXH3_128bits(page, PAGE);
    return seen.low64 == hash[0] && seen.high64 == hash[1];
}

static int keep_page(struct store *s, struct page_map *map, uint32_t *entry, const uint8_t *page,
                     char *why) {
    uint32_t slot = *entry;
    if (store_shares(s, slot, page))
        return 0;
    bool own = slot >= FIRST_SLOT && s->shared[slot - FIRST_SLOT] == 0;
    if (!own && store_allocate_slot(s, &slot, why) != 0)
        return -1;
    if (store_set(s, map, entry, slot, why) != 0)
        return -1;
    return store_write_slot(s, slot, page, PAGE, why);
}

// Looks for the content that from names. Returns 1 when found, 0 when not, -1 with why.
static int find_content(struct store *s, struct page_map *map, uint64_t address,
                        struct reference from, char *why) {
    static const uint8_t zeros[PAGE];
    uint8_t page[PAGE];
    if (from.pid > LAST_PID || from.address >= ADDRESS_END)
        return 0;
    struct page_map *theirs = store_find_process(s, from.pid); // this must make no process
    uint64_t at = from.address / PAGE;
    const struct leaf *leaf = theirs != NULL ? page_map_leaf(theirs, at) : NULL;
    uint32_t value = PAGE_UNKNOWN;
    if (leaf != NULL && !(leaf->evicted >> at % LEAF_PAGES & 1))
        value = leaf->page[at % LEAF_PAGES];
    if (value == PAGE_UNKNOWN || value == PAGE_WANTED)
        return 0;
    uint32_t *entry = page_map_insert(map, address / PAGE);
    if (entry == NULL)
        FAIL("out of memory for the index of pages");
    if (value == PAGE_ZERO)
        return has_hash(zeros, from.hash) ? store_set(s, map, entry, PAGE_ZERO, why) == 0 ? 1 : -1
                                          : 0;
    if (s->writers <= 1) { // no other thread, which could be writing to the slot now
        if (!has_hash(store_content(s, value), from.hash))
            return 0;
        if (*entry == value)
            return 1;
        if (store_reference_slot(s, value))
            return store_set(s, map, entry, value, why) == 0 ? 1 : -1;
    }
    memcpy(page, store_content(s, value), PAGE);
    if (!has_hash(page, from.hash))
        return 0;
    return keep_page(s, map, entry, page, why) == 0 ? 1 : -1;
}

static uint32_t *wanted_entry(struct store *s, const struct want *want) {
    struct page_map *map = store_find_process(s, want->pid);
    if (map == NULL || map->incarnation != want->incarnation)
        return NULL;
    uint32_t *entry = page_map_find(map, want->address / PAGE);
    return entry != NULL && *entry == PAGE_WANTED ? entry : NULL;
}

static int by_page(const void *left, const void *right) {
    const struct want *a = *(struct want *const *)left, *b = *(struct want *const *)right;
    if (a->pid != b->pid)
        return a->pid < b->pid ? -1 : 1;
    if (a->incarnation != b->incarnation)
        return a->incarnation < b->incarnation ? -1 : 1;
    if (a->address != b->address)
        return a->address < b->address ? -1 : 1;
    return a < b ? -1 : 1; // the older one first
}

// A page that was wanted, came, and is wanted again with another content is in the list twice. Only
// the last want is valid. Returns 0, or -1 without memory.
static int drop_duplicates(struct store *s) {
    struct want **order = s->wants ? malloc(s->wants * sizeof *order) : NULL;
    if (order == NULL)
        return s->wants ? -1 : 0;
    for (uint32_t i = 0; i < s->wants; i++)
        order[i] = &s->want[i];
    qsort(order, s->wants, sizeof(struct want *), by_page);
    for (uint32_t i = 0; i + 1 < s->wants; i++)
        if (order[i]->pid == order[i + 1]->pid && order[i]->address == order[i + 1]->address &&
            order[i]->incarnation == order[i + 1]->incarnation)
            order[i]->pid = 0; // no process has this pid, so this want is void
    free(order);
    return 0;
}

static void drop_found(struct store *s) {
    uint32_t left = 0;
    for (uint32_t i = 0; i < s->wants; i++)
        if (wanted_entry(s, &s->want[i]) != NULL)
            s->want[left++] = s->want[i];
    s->wants = left;
}

static int add_want(struct store *s, struct want want, char *why) {
    if (s->wants == s->wants_room) {
        drop_found(s);
        // If a source names the same pages again and again, the list would grow without end.
        if (s->wants > 2 * s->limit)
            FAIL("process %u: references never reach a page that is here", want.pid);
        uint32_t room = s->wants * 2 + 64;
        struct want *larger = realloc(s->want, room * sizeof *larger);
        if (larger == NULL)
            FAIL("out of memory for the list of wanted pages");
        s->want = larger;
        s->wants_room = room;
    }
    s->want[s->wants++] = want;
    return 0;
}

int store_resolve_reference(struct store *s, struct page_map *map, uint64_t address,
                            struct reference from, char *why) {
    int found = find_content(s, map, address, from, why);
    if (found != 0)
        return found < 0 ? -1 : 0;
    uint32_t *entry = page_map_insert(map, address / PAGE);
    if (entry == NULL)
        FAIL("out of memory for the index of pages");
    if (store_set(s, map, entry, PAGE_WANTED, why) != 0) // the old content is outdated
        return -1;
    return add_want(s, (struct want){map->pid, map->incarnation, address, from}, why);
}

const struct want *store_wants(struct store *s, uint32_t *count, char *why) {
    int rc = 0;
    pthread_mutex_lock(&s->lock);
    s->writers++;
    if (drop_duplicates(s) != 0) {
        rc = -1;
        snprintf(why, WHY, "out of memory for the list of wanted pages");
    }
    for (uint32_t i = 0; i < s->wants && rc >= 0; i++)
        if (wanted_entry(s, &s->want[i]) != NULL)
            rc = find_content(s, store_process(s, s->want[i].pid), s->want[i].address,
                              s->want[i].reference, why);
    drop_found(s);
    *count = s->wants;
    store_writer_done(s);
    pthread_mutex_unlock(&s->lock);
    static const struct want none;
    return rc < 0 ? NULL : s->wants ? s->want : &none;
}
