// SPDX-License-Identifier: Apache-2.0

#include "cold.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

enum {
    LEAVES = BLOCK_PAGES / LEAF_PAGES,
    ENOUGH = BLOCK_PAGES / 2, // pages: for fewer a huge page is not worth it
    TRIES = 4,                // what is outdated again and again is not cold
    SAMPLES = 16,
};

#define FAIL(...) return snprintf(why, WHY, __VA_ARGS__), -1

// With the lock held: of the leaf's pages those that can be copied now.
static uint64_t copyable(const struct leaf *leaf, uint64_t oldest, uint32_t newest,
                         enum cold_when when) {
    uint64_t found = 0;
    // The first round brings everything, once: what has come of it is not hot yet.
    bool late = newest > 0 && leaf->round >= newest && when == COLD_COMING;
    if (leaf->ticket >= oldest)
        return 0; // being written at this moment
    if (when != COLD_AT_LAST && (late || leaf->tries >= TRIES))
        return 0; // written of late
    for (int i = 0; i < LEAF_PAGES; i++)
        if (leaf->page[i] == PAGE_ZERO || leaf->page[i] >= FIRST_SLOT)
            found |= UINT64_C(1) << i;
    return found & ~leaf->placed & (when == COLD_AT_LAST ? leaf->copied : ~UINT64_C(0));
}

static bool look(struct page_map *map, uint64_t number, uint64_t oldest, uint32_t newest,
                 enum cold_when when, struct block *out) {
    struct leaf *leaf[LEAVES];
    uint64_t pages[LEAVES];
    uint64_t copied = 0;
    int enough = 0;
    for (int i = 0; i < LEAVES; i++) {
        leaf[i] = page_map_leaf(map, (number + (uint64_t)i) << LEAF_BITS);
        if (leaf[i] == NULL) // then there is no bit for what lies there
            return false;
        pages[i] = copyable(leaf[i], oldest, newest, when);
        copied |= leaf[i]->copied;
        enough += __builtin_popcountll(pages[i]);
    }
    bool coming = newest == 0 && when == COLD_COMING; // the rest of the block may be on its way
    if (enough < (coming ? BLOCK_PAGES : copied ? 1 : ENOUGH))
        return false;
    out->pid = map->pid;
    out->incarnation = map->incarnation;
    out->address = (number << LEAF_BITS) * PAGE;
    out->fresh = copied == 0;
    for (int i = 0; i < LEAVES; i++) {
        leaf[i]->copied |= when == COLD_AT_LAST ? 0 : ~UINT64_C(0);
        leaf[i]->placed |= pages[i];
        leaf[i]->tries += pages[i] != 0;
        for (int k = 0; k < LEAF_PAGES; k++)
            out->slot[i * LEAF_PAGES + k] = pages[i] >> k & 1 ? leaf[i]->page[k] : PAGE_UNKNOWN;
    }
    return true;
}

bool store_cold(struct store *s, struct search *at, enum cold_when when, struct block *out) {
    bool found = false;
    pthread_mutex_lock(&s->lock);
    uint64_t oldest = s->unlisted ? 0 : UINT64_MAX;
    for (uint32_t i = 0; i < WRITERS_LISTED; i++)
        if (s->writing[i] && s->writing[i] < oldest)
            oldest = s->writing[i];
    for (; at->process < s->processes && !found; at->process++, at->place = 0) {
        struct page_map *map = s->process[at->process];
        while (at->place < map->size && !found) {
            const struct leaf *first = map->table[at->place++];
            if (first != NULL && first->number % LEAVES == 0)
                found = look(map, first->number, oldest, s->newest, when, out);
        }
        if (found)
            break;
    }
    pthread_mutex_unlock(&s->lock);
    return found;
}

static struct page_map *known(const struct store *s, uint32_t pid) {
    for (uint32_t i = 0; i < s->processes; i++)
        if (s->process[i]->pid == pid)
            return s->process[i];
    return NULL;
}

void store_not_copied(struct store *s, uint32_t pid, uint64_t address) {
    pthread_mutex_lock(&s->lock);
    struct page_map *map = known(s, pid);
    for (int i = 0; map != NULL && i < LEAVES; i++) {
        struct leaf *leaf = page_map_leaf(map, address / PAGE + (uint64_t)i * LEAF_PAGES);
        if (leaf != NULL)
            leaf->placed = leaf->copied = 0;
    }
    pthread_mutex_unlock(&s->lock);
}

struct drops {
    struct prefill_drop *list;
    uint32_t used, room;
};

static int add(struct drops *drops, uint64_t address) {
    struct prefill_drop *last = drops->used ? &drops->list[drops->used - 1] : NULL;
    if (last != NULL && last->address + last->pages * PAGE == address) {
        last->pages++;
        return 0;
    }
    if (drops->used == drops->room) {
        uint32_t room = drops->room * 2 + 256;
        struct prefill_drop *larger = realloc(drops->list, room * sizeof *larger);
        if (larger == NULL)
            return -1;
        drops->list = larger;
        drops->room = room;
    }
    drops->list[drops->used++] = (struct prefill_drop){address, 1};
    return 0;
}

static const struct image *image_of(const struct store *s, const struct page_map *map) {
    for (uint32_t i = 0; i < s->images; i++)
        if (s->image[i].pid == map->pid && s->image[i].incarnation == map->incarnation)
            return &s->image[i];
    return NULL;
}

static uint64_t bits(uint64_t page, uint64_t end) {
    uint64_t many = end - page, first = page & (LEAF_PAGES - 1);
    uint64_t all = many >= LEAF_PAGES ? ~UINT64_C(0) : (UINT64_C(1) << many) - 1;
    return all << first;
}

// What is not in the table does not count: placed becomes copied and placed and of the table.
static void keep_table(struct page_map *map, const struct image *image) {
    for (uint32_t i = 0; i < map->size; i++)
        if (map->table[i] != NULL) {
            map->table[i]->ticket = map->table[i]->placed & map->table[i]->copied;
            map->table[i]->placed = 0;
        }
    for (uint32_t i = 0; image != NULL && i < image->extents; i++) {
        uint64_t page = image->extent[i].address / PAGE, end = page + image->extent[i].pages;
        while (page < end) {
            struct leaf *leaf = page_map_leaf(map, page);
            if (leaf != NULL)
                leaf->placed |= leaf->ticket & bits(page, end);
            page = (page | (LEAF_PAGES - 1)) + 1;
        }
    }
}

// What is copied there and does not count, of one leaf.
static int list(struct drops *drops, const struct leaf *leaf) {
    uint64_t address = (leaf->number << LEAF_BITS) * PAGE;
    int rc = 0;
    for (uint64_t left = leaf->copied & ~leaf->placed; left && rc == 0; left &= left - 1)
        rc = add(drops, address + (uint64_t)__builtin_ctzll(left) * PAGE);
    return rc;
}

static int list_outdated(struct drops *drops, struct page_map *map, uint64_t first) {
    struct leaf *leaf[LEAVES];
    int outdated = 0, rc = 0;
    for (uint64_t i = 0; i < LEAVES; i++) {
        leaf[i] = page_map_leaf(map, (first + i) << LEAF_BITS);
        if (leaf[i] != NULL)
            outdated += __builtin_popcountll(leaf[i]->copied & ~leaf[i]->placed);
    }
    for (int i = 0; outdated >= ENOUGH && i < LEAVES && rc == 0; i++)
        if (leaf[i] != NULL && (rc = list(drops, leaf[i])) == 0)
            leaf[i]->copied = leaf[i]->placed;
    return rc;
}

int store_outdated(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t start,
                   uint64_t end, struct prefill_drop **drop, uint32_t *count) {
    struct drops drops = {.used = 0};
    int rc = 0;
    pthread_mutex_lock(&s->lock);
    struct page_map *map = known(s, pid);
    if (map != NULL && map->incarnation == incarnation)
        for (uint32_t i = 0; i < map->size && rc == 0; i++)
            if (map->table[i] != NULL && map->table[i]->number % LEAVES == 0) {
                uint64_t number = map->table[i]->number, address = (number << LEAF_BITS) * PAGE;
                if (address >= start && address < end)
                    rc = list_outdated(&drops, map, number);
            }
    pthread_mutex_unlock(&s->lock);
    *drop = drops.list;
    *count = drops.used;
    return rc;
}

int store_settle(struct store *s, uint32_t pid, uint64_t start, uint64_t end,
                 struct prefill_drop **drop, uint32_t *count) {
    struct drops drops = {.used = 0};
    int rc = 0;
    pthread_mutex_lock(&s->lock);
    struct page_map *map = known(s, pid);
    if (map != NULL)
        keep_table(map, image_of(s, map));
    for (uint32_t i = 0; map != NULL && i < map->size && rc == 0; i++) {
        struct leaf *leaf = map->table[i];
        uint64_t address = leaf != NULL ? (leaf->number << LEAF_BITS) * PAGE : 0;
        if (leaf == NULL || address < start || address >= end)
            continue;
        rc = list(&drops, leaf);
        leaf->copied = leaf->placed;
    }
    pthread_mutex_unlock(&s->lock);
    *drop = drops.list;
    *count = drops.used;
    return rc;
}

uint64_t store_placed(struct store *s) {
    uint64_t placed = 0;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->processes; i++)
        for (uint32_t k = 0; k < s->process[i]->size; k++)
            if (s->process[i]->table[k] != NULL)
                placed += (uint64_t)__builtin_popcountll(s->process[i]->table[k]->placed);
    pthread_mutex_unlock(&s->lock);
    return placed;
}

static const struct plan_vma *vma_at(const struct plan *plan, const struct plan_process *process,
                                     uint64_t address) {
    const struct plan_vma *vma = plan_vmas(plan) + process->first;
    uint32_t low = 0, high = process->count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (vma[middle].start + vma[middle].size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < process->count && vma[low].start <= address ? &vma[low] : NULL;
}

static const struct plan_process *process_of(const struct plan *plan, uint32_t pid) {
    const struct plan_process *process = plan_processes(plan);
    for (uint32_t i = 0; i < plan->processes; i++)
        if (process[i].pid == pid)
            return &process[i];
    return NULL;
}

bool cold_planned(const struct plan *plan, uint32_t pid, uint64_t address) {
    const struct plan_process *process = process_of(plan, pid);
    const struct plan_vma *vma = process != NULL ? vma_at(plan, process, address) : NULL;
    return vma != NULL && vma->source != 0;
}

uint64_t cold_placed(const struct plan *plan, struct page_map *map, uint64_t page) {
    const struct plan_process *process = process_of(plan, map->pid);
    struct leaf *leaf = process != NULL ? page_map_leaf(map, page) : NULL;
    if (leaf == NULL || leaf->placed == 0)
        return 0;
    // A mapping may begin or end within the leaf.
    uint64_t found = 0, at = (leaf->number << LEAF_BITS) * PAGE, end = at + LEAF_PAGES * PAGE;
    while (at < end) {
        const struct plan_vma *vma = vma_at(plan, process, at);
        uint64_t next = at + PAGE;
        if (vma != NULL && vma->placed) {
            next = vma->start + vma->size < end ? vma->start + vma->size : end;
            found |= bits(at / PAGE, next / PAGE);
        }
        at = next;
    }
    return found & leaf->placed;
}

static int sample(const struct store *s, uint32_t pid, int task, const struct leaf *leaf,
                  uint64_t placed, char *why) {
    static const uint8_t zeros[PAGE];
    uint8_t page[PAGE];
    int i = __builtin_ctzll(placed);
    uint64_t address = ((leaf->number << LEAF_BITS) + (uint64_t)i) * PAGE;
    struct iovec here = {page, PAGE}, there = {(void *)(uintptr_t)address, PAGE};
    if (process_vm_readv(task, &here, 1, &there, 1, 0) != PAGE)
        FAIL("process %" PRIu32 ": what was placed at %#" PRIx64 " cannot be read: %s", pid,
             address, strerror(errno));
    const uint8_t *right = leaf->page[i] == PAGE_ZERO ? zeros : store_content(s, leaf->page[i]);
    if (memcmp(page, right, PAGE) != 0)
        FAIL("process %" PRIu32 ": another page was placed at %#" PRIx64, pid, address);
    return 0;
}

int store_placed_right(struct store *s, const struct plan *plan, uint32_t pid, int task,
                       char *why) {
    const struct plan_process *process = process_of(plan, pid);
    struct page_map *map = known(s, pid);
    const struct plan_vma *vma = process != NULL ? plan_vmas(plan) + process->first : NULL;
    for (uint32_t i = 0; map != NULL && vma != NULL && i < process->count; i++) {
        if (!vma[i].placed)
            continue;
        uint64_t first = vma[i].start / PAGE, pages = vma[i].size / PAGE;
        for (uint64_t k = 0; k < SAMPLES; k++) {
            uint64_t page = first + pages * k / SAMPLES;
            uint64_t placed = cold_placed(plan, map, page);
            struct leaf *leaf = placed ? page_map_leaf(map, page) : NULL;
            placed = leaf != NULL ? placed & ~leaf->moved : 0;
            if (placed && sample(s, pid, task, leaf, placed, why) != 0)
                return -1;
        }
    }
    return 0;
}
