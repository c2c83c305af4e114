// SPDX-License-Identifier: Apache-2.0

#include "store.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

// The file has SLACK slots more than the limit. A freed slot must not be used again while a thread
// writes. When more than half of SLACK is freed, new writers wait until no thread writes. The other
// half is for the writers that are already at work. POPULATE: bytes in one call of madvise.
enum { SLACK = 16384, POPULATE = 32 << 20 };

static bool map_file(struct store *s, int fd) {
    size_t bytes = s->capacity * PAGE;
    s->shared = calloc(s->capacity, sizeof *s->shared);
    if (s->shared == NULL || ftruncate(fd, (off_t)bytes) != 0)
        return false;
    s->map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (s->map == MAP_FAILED)
        return false;
    madvise(s->map, bytes, MADV_DONTFORK);
    return true;
}

struct store *store_open(int fd, uint64_t limit, bool keeps, char *why) {
    // The pages that come and those of each generation may all differ, so each of these has slots of
    // its own. A slot's number has 32 bits. Its count of pages has 32 bits too and cannot overflow,
    // since there are never more pages than slots.
    uint64_t copies = keeps ? 1 + GENERATIONS : 1;
    uint64_t most = (UINT32_MAX - FIRST_SLOT - SLACK - 1) / copies;
    if (limit > most) {
        snprintf(why, WHY,
                 "%" PRIu64 " pages of memory were announced, but a store has room for %" PRIu64,
                 limit, most);
        return NULL;
    }
    struct store *s = calloc(1, sizeof *s);
    errno = ENOMEM;
    if (s != NULL) {
        s->fd = fd;
        s->limit = limit;
        s->capacity = limit * copies + SLACK;
        pthread_mutex_init(&s->lock, NULL);
        pthread_cond_init(&s->no_writers, NULL);
        if (map_file(s, fd))
            return s;
        free(s->shared);
    }
    snprintf(why, WHY, "cannot make a store for %" PRIu64 " pages: %s", limit, strerror(errno));
    free(s);
    return NULL;
}

void store_close(struct store *s) {
    store_images_clear(s);
    store_generations_clear(s);
    for (uint32_t i = 0; i < s->processes; i++) {
        page_map_clear(s->process[i]);
        free(s->process[i]);
    }
    munmap(s->map, s->capacity * PAGE);
    close(s->fd);
    free(s->process);
    free(s->free_slots.slot);
    free(s->freed_slots.slot);
    free(s->shared);
    free(s->in_image);
    free(s->want);
    pthread_cond_destroy(&s->no_writers);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

int store_reserve(struct store *s, uint64_t bytes, char *why) {
    pthread_mutex_lock(&s->lock);
    uint64_t at = s->next * PAGE, end = s->capacity * PAGE;
    pthread_mutex_unlock(&s->lock);
    end = bytes < end - at ? at + bytes / PAGE * PAGE : end;
    for (; at < end; at += POPULATE) {
        size_t length = end - at < POPULATE ? end - at : POPULATE;
        if (madvise(s->map + at, length, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
            FAIL("%" PRIu64 " bytes of memory do not fit: %s", end - at,
                 errno == EFAULT ? "the file system is full" : strerror(errno));
    }
    return 0;
}

void store_free_after_copy(struct store *s) { s->free_after_copy = true; }

struct write { // pages that must be copied once the lock is released
    uint32_t slot;
    size_t bytes;
    const uint8_t *from;
};

struct writes {
    uint32_t used;
    struct write write[CHUNK_LONGEST / PAGE];
};

static int take_data_run(struct store *s, struct page_map *map, const struct run *run,
                         struct writes *w, char *why) {
    for (uint32_t i = 0; i < run->pages; i++) {
        uint32_t *entry = page_map_insert(map, run->address / PAGE + i);
        if (entry == NULL)
            FAIL("out of memory for the index of pages");
        const uint8_t *from = run->payload + (size_t)i * PAGE;
        if (store_shares(s, *entry, from))
            continue; // the page has come again with the same content, so it stays where it is
        if (*entry < FIRST_SLOT || s->shared[*entry - FIRST_SLOT] > 0) {
            uint32_t slot;
            if (store_allocate_slot(s, &slot, why) != 0 || store_set(s, map, entry, slot, why) != 0)
                return -1;
        }
        struct write *last = w->used > 0 ? &w->write[w->used - 1] : NULL;
        if (last != NULL && last->slot + last->bytes / PAGE == *entry &&
            last->from + last->bytes == from)
            last->bytes += PAGE;
        else
            w->write[w->used++] = (struct write){*entry, PAGE, from};
    }
    return 0;
}

static int take_zero_run(struct store *s, struct page_map *map, const struct run *run, char *why) {
    for (uint64_t i = 0; i < run->pages; i++) {
        uint32_t *entry = page_map_insert(map, run->address / PAGE + i);
        if (entry == NULL)
            FAIL("out of memory for the index of pages");
        if (store_set(s, map, entry, PAGE_ZERO, why) != 0)
            return -1;
    }
    return 0;
}

// Marks what the early CRIU holds of these pages as outdated. The caller must hold the lock since
// it set the pages' entries.
static void mark_outdated(const struct store *s, struct page_map *map, const struct run *run,
                          uint32_t round) {
    uint64_t page = run->address / PAGE, end = page + run->pages;
    for (; page < end; page = (page | (LEAF_PAGES - 1)) + 1) {
        struct leaf *leaf = page_map_leaf(map, page);
        if (leaf == NULL)
            continue;
        leaf->preplaced &= ~page_bits(page, end);
        leaf->evicted &= ~page_bits(page, end);
        leaf->ticket = s->tickets;
        leaf->round = round;
    }
}

static int take_reference_run(struct store *s, struct page_map *map, const struct run *run,
                              char *why) {
    for (uint32_t i = 0; i < run->pages; i++)
        if (store_resolve_reference(s, map, run->address + (uint64_t)i * PAGE,
                                    chunk_reference(run, i), why))
            return -1;
    return 0;
}

static int take_runs(struct store *s, const struct chunk *c, struct page_map *map, char *why) {
    struct writes w = {.used = 0};
    int rc = 0;
    bool references = false;
    for (uint32_t i = 0; i < c->runs && rc == 0; i++) {
        const struct run *run = &c->run[i];
        if (run->kind == RUN_DATA)
            rc = take_data_run(s, map, run, &w, why);
        else if (run->kind != RUN_REFERENCE)
            rc = take_zero_run(s, map, run, why);
        mark_outdated(s, map, run, c->round);
        references |= run->kind == RUN_REFERENCE;
    }
    pthread_mutex_unlock(&s->lock);
    for (uint32_t i = 0; i < w.used && rc == 0; i++)
        rc = store_write_slot(s, w.write[i].slot, w.write[i].from, w.write[i].bytes, why);
    pthread_mutex_lock(&s->lock);
    if (references && map->incarnation != c->incarnation)
        return rc; // another thread has taken a chunk of a later incarnation meanwhile
    for (uint32_t i = 0; i < c->runs && rc == 0; i++)
        if (c->run[i].kind == RUN_REFERENCE) {
            rc = take_reference_run(s, map, &c->run[i], why);
            mark_outdated(s, map, &c->run[i], c->round);
        }
    return rc;
}

static int take_chunk(struct store *s, const struct chunk *c, char *why) {
    if (s->broken)
        FAIL("an earlier write to the store of pages has failed");
    if (c->named > s->limit)
        FAIL("process %" PRIu32 " sent %" PRIu64 " pages in one chunk, but %" PRIu64
             " were announced in all",
             c->pid, c->named, s->limit);
    struct page_map *map = store_process(s, c->pid);
    if (map == NULL)
        FAIL("more than %d processes sent pages", PROCESSES_MOST);
    if (map->reverted) {
        // The source may have been restarted, and then it counts incarnations from the start. It sends all
        // pages that may have changed since the generation, so the others stay.
        map->incarnation = c->incarnation;
        map->reverted = false;
    }
    if (c->incarnation < map->incarnation)
        return 0; // it is of an earlier incarnation, so it is ignored
    if (c->incarnation > map->incarnation) {
        store_drop_process(s, map, &s->freed_slots);
        map->incarnation = c->incarnation;
    }
    if (c->round > s->newest_round)
        s->newest_round = c->round;
    return take_runs(s, c, map, why);
}

// Gives a write the next ticket, and notes it in a free place of writing, which it returns.
static uint64_t *begin_write(struct store *s) {
    uint64_t *place = s->writing;
    while (*place != 0) // there are fewer other writers than places
        place++;
    *place = ++s->tickets;
    return place;
}

int store_write(struct store *s, const uint8_t *raw, size_t length, char *why) {
    struct chunk c;
    if (chunk_read(&c, raw, length, why) != 0)
        return -1;
    pthread_mutex_lock(&s->lock);
    while (s->writers >= WRITERS_MOST || (s->freed_slots.used > SLACK / 2 && s->writers > 0))
        pthread_cond_wait(&s->no_writers, &s->lock);
    s->writers++;
    uint64_t *ticket = begin_write(s);
    int rc = take_chunk(s, &c, why);
    s->broken |= rc != 0;
    *ticket = 0;
    store_writer_done(s);
    pthread_mutex_unlock(&s->lock);
    return rc;
}
