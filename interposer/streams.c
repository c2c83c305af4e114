/* SPDX-License-Identifier: Apache-2.0 */
#include "streams.h"
#include "clocks.h"
#include "cuda_calls.h"

/* Rows are given out and taken back under it; never held across a call. */
static pthread_mutex_t rows = PTHREAD_MUTEX_INITIALIZER;

static uint64_t number_of(void *handle) {
    return handle != NULL ? (uint64_t)(uintptr_t)handle : STREAM_LEGACY;
}

/* Of rows alike, the legacy stream has one for each device. */
static bool is_row_of(const struct liveshift_stream *row, uint64_t number, int device) {
    return atomic_load(&row->handle) == number &&
           (number > STREAM_PER_THREAD || row->device == device);
}

struct liveshift_stream *stream_row(struct gate *gate, void *handle, int device) {
    struct liveshift_page *page = gate->page;
    struct liveshift_stream *table = liveshift_streams(page), *row = NULL;
    uint64_t number = number_of(handle);
    pthread_mutex_lock(&rows);
    uint32_t used = atomic_load(&page->streams), at = 0, spare = used;
    while (at < used && !is_row_of(&table[at], number, device)) {
        if (spare == used && atomic_load(&table[at].handle) == 0)
            spare = at;
        at++;
    }
    if (at < used)
        row = &table[at];
    else {
        if (spare == used)
            spare = page_next_row(gate, used, LIVESHIFT_PAGE_STREAMS, LIVESHIFT_STREAMS_AT,
                                  sizeof *table, "stream");
        if (spare != UINT32_MAX) {
            row = &table[spare];
            row->device = device;
            row->flags = 0;
            row->priority = 0;
            atomic_store(&row->use, STREAM_UNUSED);
            atomic_store(&row->handle, number);
            if (spare == used)
                atomic_store(&page->streams, used + 1);
        }
    }
    pthread_mutex_unlock(&rows);
    return row;
}

enum stream_use stream_carries(int device, void *handle,
                               _Atomic(struct liveshift_stream *) *known) {
    if (cuda_captures(handle))
        return STREAM_CAPTURED;
    struct liveshift_stream *row = atomic_load_explicit(known, memory_order_relaxed);
    if (row == NULL ||
        atomic_load_explicit(&row->handle, memory_order_relaxed) != number_of(handle)) {
        row = stream_row(gate_here(), handle, device);
        atomic_store_explicit(known, row, memory_order_relaxed);
    }
    if (row != NULL && atomic_load_explicit(&row->use, memory_order_relaxed) != STREAM_CARRIES)
        atomic_store(&row->use, STREAM_CARRIES);
    return STREAM_CARRIES;
}

void stream_gone(void *handle) {
    struct liveshift_page *page = gate_here()->page;
    struct liveshift_stream *table = liveshift_streams(page);
    pthread_mutex_lock(&rows);
    for (uint32_t at = 0; at < atomic_load(&page->streams); at++)
        if (atomic_load(&table[at].handle) == number_of(handle))
            atomic_store(&table[at].handle, 0);
    pthread_mutex_unlock(&rows);
}
