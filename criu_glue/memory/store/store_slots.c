// SPDX-License-Identifier: Apache-2.0

#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int push(struct slots *list, uint32_t slot) {
    if (list->used == list->room) {
        uint32_t room = list->room ? list->room * 2 : 1024;
        uint32_t *larger = realloc(list->slot, room * sizeof *larger);
        if (larger == NULL)
            return -1;
        list->slot = larger;
        list->room = room;
    }
    list->slot[list->used++] = slot;
    return 0;
}

int store_allocate_slot(struct store *s, uint32_t *slot, char *why) {
    if (s->free_slots.used > 0)
        *slot = s->free_slots.slot[--s->free_slots.used];
    else if (s->next < s->capacity)
        *slot = FIRST_SLOT + (uint32_t)s->next++;
    else
        FAIL("the store is full: %" PRIu64 " pages", s->capacity);
    return 0;
}

void store_release_slot(struct store *s, uint32_t slot, struct slots *freed) {
    if (s->shared[slot - FIRST_SLOT] > 0)
        s->shared[slot - FIRST_SLOT]--;
    else
        push(freed, slot); // without memory for the list only this slot is lost
}

bool store_reference_slot(struct store *s, uint32_t slot) {
    if (s->shared[slot - FIRST_SLOT] == UINT32_MAX)
        return false;
    s->shared[slot - FIRST_SLOT]++;
    return true;
}

int store_set(struct store *s, struct page_map *map, uint32_t *entry, uint32_t value, char *why) {
    if (*entry == PAGE_UNKNOWN && value != PAGE_UNKNOWN) {
        if (s->known == s->limit)
            FAIL("process %" PRIu32 " sent more than the %" PRIu64 " bytes announced", map->pid,
                 s->limit * PAGE);
        s->known++;
        map->known++;
    }
    if (*entry >= FIRST_SLOT && *entry != value)
        store_release_slot(s, *entry, &s->freed_slots);
    *entry = value;
    return 0;
}

void store_free(struct store *s, uint32_t slot, uint32_t pages) {
    for (uint32_t i = 0, many; i < pages; i += many + 1) {
        for (many = 0; i + many < pages && s->shared[slot - FIRST_SLOT + i + many] == 0; many++)
            continue;
        if (many > 0) // an error does no harm: the memory stays in the file
            (void)!fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                             (off_t)(slot - FIRST_SLOT + i) * PAGE, (off_t)many * PAGE);
    }
}

static void reuse(struct store *s, struct slots *list) {
    for (uint32_t i = list->used; i-- > 0;) // from the end, so the first one is used first
        push(&s->free_slots, list->slot[i]);
    list->used = 0;
}

void store_free_slots(struct store *s, struct slots *list) {
    for (uint32_t i = 0, many; i < list->used; i += many) {
        for (many = 1; i + many < list->used; many++)
            if (list->slot[i + many] != list->slot[i] + many)
                break;
        store_free(s, list->slot[i], many); // without the lock: these slots are in no other list
    }
    pthread_mutex_lock(&s->lock);
    reuse(s, list);
    pthread_mutex_unlock(&s->lock);
    free(list->slot);
}

void store_writer_done(struct store *s) {
    if (--s->writers > 0)
        return;
    reuse(s, &s->freed_slots);
    pthread_cond_broadcast(&s->no_writers);
}

void store_drop_process(struct store *s, struct page_map *map, struct slots *freed) {
    for (uint32_t i = 0; i < map->size; i++)
        for (int k = 0; map->table[i] != NULL && k < LEAF_PAGES; k++)
            if (map->table[i]->page[k] >= FIRST_SLOT)
                store_release_slot(s, map->table[i]->page[k], freed);
    s->known -= map->known;
    page_map_clear(map);
}

// Returns how many processes have a lower pid.
static uint32_t place_of(const struct store *s, uint32_t pid) {
    uint32_t low = 0, high = s->processes;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (s->process[middle]->pid < pid)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct page_map *store_find_process(const struct store *s, uint32_t pid) {
    uint32_t place = place_of(s, pid);
    return place < s->processes && s->process[place]->pid == pid ? s->process[place] : NULL;
}

struct page_map *store_process(struct store *s, uint32_t pid) {
    struct page_map *map = store_find_process(s, pid);
    if (map != NULL || s->processes == PROCESSES_MOST)
        return map;
    struct page_map **larger = realloc(s->process, (s->processes + 1) * sizeof(*larger));
    if (larger == NULL)
        return NULL;
    s->process = larger;
    map = calloc(1, sizeof *map);
    if (map == NULL)
        return NULL;
    map->pid = pid;
    uint32_t place = place_of(s, pid);
    memmove(&larger[place + 1], &larger[place], (s->processes - place) * sizeof(*larger));
    larger[place] = map;
    s->processes++;
    return map;
}

bool store_shares(const struct store *s, uint32_t slot, const uint8_t *page) {
    return slot >= FIRST_SLOT && s->shared[slot - FIRST_SLOT] > 0 &&
           memcmp(store_content(s, slot), page, PAGE) == 0;
}

int store_write_slot(struct store *s, uint32_t slot, const void *from, size_t bytes, char *why) {
    uint64_t at = (uint64_t)(slot - FIRST_SLOT) * PAGE;
    const uint8_t *next = from;
    while (bytes > 0) {
        ssize_t n = pwrite(s->fd, next, bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            FAIL("%zu bytes of memory could not be kept: %s", bytes, strerror(errno));
        next += n;
        at += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return 0;
}
