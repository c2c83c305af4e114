// SPDX-License-Identifier: Apache-2.0
//
// Generations: what the store had at earlier freezes of the same capsule.
//
// A generation is the list of extents of a freeze. Each of its pages counts as one more page in its
// slot. A slot in which several pages lie is never written: a chunk with another content takes
// another slot (store.c, take_data_run). So what a generation has stays as it is, and only pages
// that differ take memory twice. When a generation is dropped, the slots that only it had go back.
//
// A slot gets a further page only while no other thread writes. So no write to a slot is under way
// when the slot becomes a generation's, and none to a slot that only a generation had.

#include "store.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>

struct generation *store_find_generation(struct store *s, uint64_t number) {
    for (int i = 0; i < GENERATIONS; i++)
        if (number != 0 && s->kept[i].number == number && !s->kept[i].dropped)
            return &s->kept[i];
    return NULL;
}

static void clear(struct generation *g) {
    for (uint32_t i = 0; i < g->images; i++)
        free(g->image[i].extent);
    free(g->image);
    *g = (struct generation){0};
}

void store_generations_clear(struct store *s) {
    for (int i = 0; i < GENERATIONS; i++)
        clear(&s->kept[i]);
}

void store_count_pages(struct store *s, const struct generation *g) {
    for (uint32_t i = 0; i < g->images; i++)
        for (uint32_t k = 0; k < g->image[i].extents; k++) {
            const struct extent *e = &g->image[i].extent[k];
            for (uint32_t page = 0; e->slot >= FIRST_SLOT && page < e->pages; page++)
                store_reference_slot(s, extent_slot(e, page)); // cannot fail, see store_open
        }
}

static void forget(struct store *s, struct generation *g, struct slots *freed) {
    for (uint32_t i = 0; i < g->images; i++)
        for (uint32_t k = 0; k < g->image[i].extents; k++) {
            const struct extent *e = &g->image[i].extent[k];
            for (uint32_t page = 0; e->slot >= FIRST_SLOT && page < e->pages; page++)
                store_release_slot(s, extent_slot(e, page), freed);
        }
    clear(g);
}

void store_lock_without_writers(struct store *s) {
    pthread_mutex_lock(&s->lock);
    while (s->writers > 0)
        pthread_cond_wait(&s->no_writers, &s->lock);
}

// Checks that all pages of the image are where its table found them.
static int check_pages(const struct store *s, const struct image *image, char *why) {
    struct page_map *map = store_find_process(s, image->pid);
    if (map != NULL && map->incarnation != image->incarnation)
        map = NULL;
    for (uint32_t i = 0; i < image->extents; i++) {
        const struct extent *e = &image->extent[i];
        for (uint32_t page = 0; page < e->pages; page++) {
            uint64_t address = e->address + (uint64_t)page * PAGE;
            const uint32_t *entry = map != NULL ? page_map_find(map, address / PAGE) : NULL;
            if (entry == NULL || *entry != extent_slot(e, page))
                FAIL("process %" PRIu32 ": the page at %#" PRIx64 " has come again since its table",
                     image->pid, address);
        }
    }
    return 0;
}

// Makes the images the generation, which gets a free place. Its pages are not counted yet.
static int take_images(struct store *s, uint64_t number, char *why) {
    struct generation *g = NULL;
    if (number == 0 || store_find_generation(s, number) != NULL)
        FAIL("a generation cannot be kept under the number %" PRIu64 ": %s", number,
             number == 0 ? "numbers begin at 1" : "there is one already");
    for (int i = 0; i < GENERATIONS; i++)
        if (s->kept[i].number == 0)
            g = &s->kept[i];
    if (g == NULL)
        FAIL("generation %" PRIu64 " has no place beside %" PRIu64 " and %" PRIu64
             ": one of them must be dropped before, and its readers must have finished",
             number, s->kept[0].number, s->kept[1].number);
    *g = (struct generation){.number = number, .image = s->image, .images = s->images};
    s->image = NULL;
    s->images = 0;
    return 0;
}

static int keep(struct store *s, uint64_t number, char *why) {
    if (s->broken)
        FAIL("a write to the store of pages has failed");
    for (uint32_t i = 0; i < s->images; i++)
        if (check_pages(s, &s->image[i], why) != 0)
            return -1;
    if (take_images(s, number, why) != 0)
        return -1;
    store_count_pages(s, store_find_generation(s, number));
    return 0;
}

int store_keep(struct store *s, uint64_t number, char *why) {
    store_lock_without_writers(s);
    int rc = keep(s, number, why);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

void store_drop(struct store *s, uint64_t number) {
    struct slots freed = {0};
    pthread_mutex_lock(&s->lock);
    struct generation *g = store_find_generation(s, number);
    if (g != NULL && g->readers == 0)
        forget(s, g, &freed);
    else if (g != NULL)
        g->dropped = true;
    pthread_mutex_unlock(&s->lock);
    store_free_slots(s, &freed);
}

struct generation *store_use(struct store *s, uint64_t number) {
    pthread_mutex_lock(&s->lock);
    struct generation *g = store_find_generation(s, number);
    if (g != NULL)
        g->readers++;
    pthread_mutex_unlock(&s->lock);
    return g;
}

void store_unuse(struct store *s, struct generation *g) {
    struct slots freed = {0};
    pthread_mutex_lock(&s->lock);
    if (--g->readers == 0 && g->dropped)
        forget(s, g, &freed);
    pthread_mutex_unlock(&s->lock);
    store_free_slots(s, &freed);
}

uint32_t store_kept(struct store *s, uint64_t numbers[GENERATIONS]) {
    uint32_t count = 0;
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < GENERATIONS; i++)
        if (s->kept[i].number != 0 && !s->kept[i].dropped)
            numbers[count++] = s->kept[i].number;
    pthread_mutex_unlock(&s->lock);
    return count;
}

int store_load_generation(struct store *s, uint64_t number, char *why) {
    uint64_t pages = 0;
    for (uint32_t i = 0; i < s->images; i++)
        pages += s->image[i].pages;
    if (pages > s->limit)
        FAIL("generation %" PRIu64 " has %" PRIu64 " pages, but %" PRIu64 " were announced", number,
             pages, s->limit);
    return take_images(s, number, why); // store_load_image has counted the pages
}

static bool is_loaded(const struct store *s, uint64_t slot) {
    return s->in_image != NULL && s->in_image[slot / 8] >> slot % 8 & 1;
}

void store_end_load(struct store *s) {
    struct slots unused = {0};
    s->next = s->capacity;
    while (s->next > 0 && !is_loaded(s, s->next - 1))
        s->next--;
    // Chunks of a generation that was not kept may have come. An error does no harm, as in
    // store_free.
    (void)!fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(s->next * PAGE),
                     (off_t)((s->capacity - s->next) * PAGE));
    for (uint32_t slot = 0; slot < s->next; slot++)
        if (!is_loaded(s, slot))
            store_release_slot(s, FIRST_SLOT + slot, &unused);
    store_free_slots(s, &unused);
    free(s->in_image); // the counts say it all now
    s->in_image = NULL;
}
