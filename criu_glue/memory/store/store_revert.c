// SPDX-License-Identifier: Apache-2.0
//
// Goes back to a generation: the processes have its pages again, and no others. This is for a freeze
// of which not all has come, and for a store that was loaded.

#include "store.h"

#include <inttypes.h>
#include <stdlib.h>

// Makes the pages of a process as they were. NULL without memory.
static struct page_map *map_of(const struct image *image) {
    struct page_map *map = calloc(1, sizeof *map);
    if (map == NULL)
        return NULL;
    map->pid = image->pid;
    map->incarnation = image->incarnation;
    map->reverted = true;
    for (uint32_t i = 0; i < image->extents; i++) {
        const struct extent *e = &image->extent[i];
        for (uint32_t page = 0; page < e->pages; page++) {
            uint32_t *entry = page_map_insert(map, e->address / PAGE + page);
            if (entry == NULL) {
                page_map_clear(map);
                free(map);
                return NULL;
            }
            *entry = extent_slot(e, page);
            map->known++;
        }
    }
    return map;
}

static int by_pid(const void *left, const void *right) {
    uint32_t a = (*(struct page_map *const *)left)->pid,
             b = (*(struct page_map *const *)right)->pid;
    return a < b ? -1 : a > b;
}

// Makes the pages of all processes, in the order of their pids. NULL without memory.
static struct page_map **maps_of(const struct generation *g) {
    struct page_map **maps = calloc(g->images + 1, sizeof *maps);
    for (uint32_t i = 0; maps != NULL && i < g->images; i++) {
        maps[i] = map_of(&g->image[i]);
        if (maps[i] != NULL)
            continue;
        while (i-- > 0) {
            page_map_clear(maps[i]);
            free(maps[i]);
        }
        free(maps);
        return NULL;
    }
    if (maps != NULL)
        qsort(maps, g->images, sizeof(struct page_map *), by_pid);
    return maps;
}

static int revert(struct store *s, uint64_t number, struct slots *freed, char *why) {
    static const struct generation nothing;
    const struct generation *g = number == 0 ? &nothing : store_find_generation(s, number);
    if (g == NULL)
        FAIL("generation %" PRIu64 " is not kept", number);
    struct page_map **maps = maps_of(g);
    if (maps == NULL)
        FAIL("out of memory for the index of pages");
    for (uint32_t i = 0; i < s->processes; i++) { // from here on nothing can fail
        store_drop_process(s, s->process[i], freed);
        free(s->process[i]);
    }
    free(s->process);
    s->process = maps;
    s->processes = g->images;
    for (uint32_t i = 0; i < g->images; i++)
        s->known += maps[i]->known;
    store_count_pages(s, g);
    store_images_clear(s);
    s->wants = 0;
    s->broken = false;
    return 0;
}

int store_revert(struct store *s, uint64_t number, char *why) {
    struct slots freed = {0};
    store_lock_without_writers(s);
    int rc = revert(s, number, &freed, why);
    pthread_mutex_unlock(&s->lock);
    store_free_slots(s, &freed);
    return rc;
}
