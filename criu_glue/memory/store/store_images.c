// SPDX-License-Identifier: Apache-2.0

#include "store.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

void store_images_clear(struct store *s) {
    for (uint32_t i = 0; i < s->images; i++)
        free(s->image[i].extent);
    free(s->image);
    s->image = NULL;
    s->images = 0;
}

const struct image *store_images(struct store *s, uint32_t *count) {
    *count = s->images;
    return s->image;
}

const struct image *store_find_image(const struct store *s, uint32_t pid) {
    for (uint32_t i = 0; i < s->images; i++)
        if (s->image[i].pid == pid)
            return &s->image[i];
    return NULL;
}

// Adds an empty image behind all others.
static int add(struct store *s, uint32_t pid, uint32_t incarnation, char *why) {
    if (store_find_image(s, pid) != NULL)
        FAIL("process %" PRIu32 " is twice in the table", pid);
    if (s->images == PROCESSES_MOST)
        FAIL("the table names %" PRIu32 " processes, at most %d fit", s->images + 1,
             PROCESSES_MOST);
    struct image *larger = realloc(s->image, (s->images + 1) * sizeof *larger);
    if (larger == NULL)
        FAIL("out of memory for the table of process %" PRIu32, pid);
    s->image = larger;
    larger[s->images++] = (struct image){.pid = pid, .incarnation = incarnation};
    return 0;
}

static int append(struct image *image, uint32_t *room, uint64_t address, uint32_t slot) {
    struct extent *last = image->extents ? &image->extent[image->extents - 1] : NULL;
    image->pages++;
    image->data += slot >= FIRST_SLOT;
    if (last != NULL && last->address + (uint64_t)last->pages * PAGE == address &&
        last->pages < UINT32_MAX &&
        (slot == PAGE_ZERO ? last->slot == PAGE_ZERO
                           : last->slot >= FIRST_SLOT && last->slot + last->pages == slot)) {
        last->pages++;
        return 0;
    }
    if (image->extents == *room) {
        uint32_t more = *room * 2 + 64;
        struct extent *larger = realloc(image->extent, more * sizeof *larger);
        if (larger == NULL)
            return -1;
        image->extent = larger;
        *room = more;
    }
    image->extent[image->extents++] = (struct extent){address, 1, slot};
    return 0;
}

static int collect(struct store *s, struct image *image, const uint64_t *runs, uint32_t count,
                   char *why) {
    struct page_map *map = store_process(s, image->pid);
    uint64_t end = 0, left = s->limit, missing = 0, first_missing = 0;
    uint32_t room = 0;
    if (map == NULL)
        FAIL("more than %d processes sent pages", PROCESSES_MOST);
    bool other = map->incarnation != image->incarnation;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t address = runs[2 * i], pages = runs[2 * i + 1];
        if (address % PAGE != 0 || address >= ADDRESS_END || address < end || pages == 0 ||
            pages > (ADDRESS_END - address) / PAGE || pages > left)
            FAIL("process %" PRIu32 ": its table is invalid at %#" PRIx64 " (%" PRIu64 " pages)",
                 image->pid, address, pages);
        end = address + pages * PAGE;
        left -= pages;
        for (; address < end; address += PAGE) {
            uint32_t *entry = other ? NULL : page_map_find(map, address / PAGE);
            if (entry != NULL && *entry != PAGE_UNKNOWN && *entry != PAGE_WANTED) {
                if (append(image, &room, address, *entry) != 0)
                    FAIL("out of memory for the table of process %" PRIu32, image->pid);
            } else if (missing++ == 0) {
                first_missing = address;
            }
        }
    }
    if (s->broken)
        FAIL("a write to the store of pages has failed");
    if (missing > 0)
        FAIL("process %" PRIu32 ": %" PRIu64 " pages have not come, the first of them at %#" PRIx64,
             image->pid, missing, first_missing);
    return 0;
}

int store_image(struct store *s, uint32_t pid, uint32_t incarnation, const uint64_t *runs,
                uint32_t count, char *why) {
    if (pid == 0 || pid > LAST_PID)
        FAIL("%" PRIu32 " is not a valid pid in a table", pid);
    pthread_mutex_lock(&s->lock);
    int rc = add(s, pid, incarnation, why);
    if (rc == 0)
        rc = collect(s, &s->image[s->images - 1], runs, count, why);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

// Counts how many pages lie in each slot. After a load the store knows that only from its images.
static void count_shared(struct store *s, uint64_t slot, uint32_t pages) {
    for (uint64_t end = slot + pages; slot < end; slot++) {
        if (s->in_image[slot / 8] >> slot % 8 & 1 && s->shared[slot] < UINT32_MAX)
            s->shared[slot]++;
        s->in_image[slot / 8] |= (uint8_t)(1 << slot % 8);
    }
}

int store_load_image(struct store *s, uint32_t pid, uint32_t incarnation,
                     const struct extent *extent, uint32_t count, char *why) {
    if (add(s, pid, incarnation, why) != 0)
        return -1;
    struct image *image = &s->image[s->images - 1];
    if (s->in_image == NULL && (s->in_image = calloc(s->capacity / 8 + 1, 1)) == NULL)
        FAIL("out of memory for the counts of shared slots");
    uint64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct extent *e = &extent[i];
        bool data = e->slot >= FIRST_SLOT;
        if (e->address % PAGE != 0 || e->address < end || e->address >= ADDRESS_END ||
            e->pages == 0 || e->pages > (ADDRESS_END - e->address) / PAGE ||
            (data ? e->slot - FIRST_SLOT + (uint64_t)e->pages > s->capacity : e->slot != PAGE_ZERO))
            FAIL("process %" PRIu32 ": its table is invalid at %#" PRIx64 " (%" PRIu32
                 " pages, slot %" PRIu32 ")",
                 pid, e->address, e->pages, e->slot);
        end = e->address + (uint64_t)e->pages * PAGE;
        image->pages += e->pages;
        image->data += data ? e->pages : 0;
    }
    for (uint32_t i = 0; i < count; i++)
        if (extent[i].slot >= FIRST_SLOT)
            count_shared(s, extent[i].slot - FIRST_SLOT, extent[i].pages);
    image->extent = malloc(count * sizeof *extent + 1);
    if (image->extent == NULL)
        FAIL("out of memory for the table of process %" PRIu32, pid);
    memcpy(image->extent, extent, count * sizeof *extent);
    image->extents = count;
    return 0;
}

uint32_t store_runs(const struct image *image, uint64_t *runs) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < image->extents; i++) {
        const struct extent *e = &image->extent[i];
        if (count > 0 && runs[2 * count - 2] + runs[2 * count - 1] * PAGE == e->address) {
            runs[2 * count - 1] += e->pages;
        } else {
            runs[2 * count] = e->address;
            runs[2 * count++ + 1] = e->pages;
        }
    }
    return count;
}

size_t store_next_chunk(const struct store *s, const struct image *all, uint32_t images,
                        struct chunk_cursor *at, uint8_t *chunk) {
    while (at->image < images && at->extent == all[at->image].extents) {
        at->image++;
        at->extent = at->page = 0;
    }
    if (at->image == images)
        return 0;
    const struct image *image = &all[at->image];
    uint32_t runs = 0, copied = 0;
    memset(chunk, 0, PAGE);
    uint8_t *next = chunk + CHUNK_HEAD;
    while (at->extent < image->extents && runs < CHUNK_RUNS) {
        const struct extent *e = &image->extent[at->extent];
        bool data = e->slot >= FIRST_SLOT;
        uint32_t pages = e->pages - at->page, room = CHUNK_PAYLOAD / PAGE - copied;
        if (data && pages > room)
            pages = room;
        if (pages == 0)
            break;
        uint64_t address = e->address + (uint64_t)at->page * PAGE;
        next = chunk_put_run(next, address, pages, data ? RUN_DATA : RUN_ZERO);
        runs++;
        if (data) {
            memcpy(chunk + PAGE + (size_t)copied * PAGE, store_content(s, e->slot + at->page),
                   (size_t)pages * PAGE);
            copied += pages;
        }
        at->page += pages;
        if (at->page == e->pages) {
            at->extent++;
            at->page = 0;
        }
    }
    chunk_put_head(chunk, image->pid, image->incarnation, 0, runs);
    return copied ? PAGE + (size_t)copied * PAGE : (size_t)(next - chunk);
}
