// SPDX-License-Identifier: Apache-2.0

#include "regions.h"

#include "page.h"

#include <errno.h>
#include <stdlib.h>

int regions_reserve(struct regions *list, size_t more) {
    if (list->count + more <= list->room)
        return 0;
    size_t room = list->room ? 2 * list->room : 1024;
    if (room < list->count + more)
        room = list->count + more;
    struct region *larger = realloc(list->at, room * sizeof *larger);
    if (larger == NULL)
        return -ENOMEM;
    list->at = larger;
    list->room = room;
    return 0;
}

int regions_add(struct regions *list, uint64_t start, uint64_t end) {
    struct region *last = list->count ? &list->at[list->count - 1] : NULL;
    list->bytes += end - start;
    if (last != NULL && last->end == start) {
        last->end = end;
        return 0;
    }
    int rc = regions_reserve(list, 1);
    if (rc == 0)
        list->at[list->count++] = (struct region){start, end, 0};
    return rc;
}

void regions_runs(const struct regions *list, uint64_t *out) {
    for (size_t i = 0; i < list->count; i++) {
        *out++ = list->at[i].start;
        *out++ = (list->at[i].end - list->at[i].start) / PAGE;
    }
}

struct regions *regions_new(void) { return calloc(1, sizeof(struct regions)); }

void regions_clear(struct regions *list) {
    list->count = 0;
    list->bytes = 0;
}

void regions_free(struct regions *list) {
    free(list->at);
    free(list);
}
