/* SPDX-License-Identifier: Apache-2.0 */
#include "streams.h"

#include "gate/process.h"
#include "ledger_rows.h"
#include "nccl/vcomm.h"

#define CACHE 512

/* Threads give out and take back rows under it. */
static pthread_mutex_t rows = PTHREAD_MUTEX_INITIALIZER;

static _Atomic bool seen[LIVESHIFT_PAGE_STREAMS];

/* The row + 1 where a stream was found last. It is a hint, which we check against the row. */
static _Atomic uint32_t cache[CACHE];

void streams_forked(void) { rows = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

static struct liveshift_stream *table(void) { return liveshift_streams(current_gate()->page); }

static bool matches(struct liveshift_stream *row, uint64_t handle, int32_t device) {
    return atomic_load_explicit(&row->handle, memory_order_acquire) == handle &&
           (handle > STREAM_PER_THREAD || row->device == device);
}

static _Atomic uint32_t *hint_for(uint64_t handle, int32_t device) {
    if (handle <= STREAM_PER_THREAD)
        handle += (uint64_t)(uint32_t)device << 8;
    return &cache[(handle * 0x9e3779b97f4a7c15u) >> 48 & (CACHE - 1)];
}

/* The row of a stream. NULL: the stream is unknown or, with `add`, there is no room. */
static struct liveshift_stream *find(uint64_t handle, int32_t device, bool add) {
    struct gate *gate = current_gate();
    struct liveshift_stream *all = table(), *found = NULL;
    _Atomic uint32_t *hint = hint_for(handle, device);
    uint32_t at = atomic_load_explicit(hint, memory_order_relaxed);
    if (at != 0 && at <= atomic_load(&gate->page->streams) && matches(&all[at - 1], handle, device))
        return &all[at - 1];
    const char *why = NULL;
    uint32_t unused = UINT32_MAX;
    pthread_mutex_lock(&rows);
    uint32_t used = atomic_load(&gate->page->streams);
    for (at = 0; at < used && !matches(&all[at], handle, device); at++)
        if (unused == UINT32_MAX && atomic_load(&all[at].handle) == 0)
            unused = at;
    if (at < used)
        found = &all[at];
    else if (add) {
        at = unused != UINT32_MAX ? unused : used;
        if (at == used)
            why = process_next_row(gate, used, LIVESHIFT_PAGE_STREAMS, LIVESHIFT_STREAMS_AT,
                                   sizeof *all);
        if (why == NULL) {
            found = &all[at];
            atomic_store(&seen[at], false);
            found->device = device;
            found->flags = 0;
            found->priority = 0;
            atomic_store(&found->use, 0);
            atomic_store_explicit(&found->handle, handle, memory_order_release);
            if (at == used)
                atomic_store(&gate->page->streams, used + 1);
        }
    }
    pthread_mutex_unlock(&rows);
    if (found != NULL)
        atomic_store_explicit(hint, at + 1, memory_order_relaxed);
    if (why != NULL) {
        atomic_fetch_add(&gate->page->ledger.missed, 1);
        warn_no_row("stream", why);
    }
    return found;
}

struct liveshift_stream *stream_row(uint64_t handle, int32_t device) {
    return find(handle != 0 ? handle : STREAM_LEGACY, device, true);
}

void stream_created(uint64_t handle, int32_t device, uint32_t flags, int32_t priority) {
    struct liveshift_stream *row = stream_row(handle, device);
    if (row == NULL)
        return;
    row->device = device;
    row->flags = flags;
    row->priority = priority;
    atomic_store(&row->use, 0);
    atomic_store(&seen[row - table()], true);
}

bool stream_seen(const struct liveshift_stream *row) { return atomic_load(&seen[row - table()]); }

int32_t stream_device(uint64_t handle, int32_t device) {
    if (handle <= STREAM_PER_THREAD || atomic_load(&process_gate) == NULL)
        return device;
    struct liveshift_stream *row = find(handle, device, false);
    return row != NULL ? row->device : device;
}

struct liveshift_stream *stream_destroy_begin(uint64_t handle) {
    if (handle <= STREAM_PER_THREAD || atomic_load(&process_gate) == NULL)
        return NULL;
    struct liveshift_stream *row = find(handle, -1, false);
    /* Another stream may get the handle before the call is back. */
    if (row != NULL) {
        pthread_mutex_lock(&rows); /* a drain may be asking the driver about the stream */
        atomic_store(&row->handle, UINT64_MAX);
        pthread_mutex_unlock(&rows);
        vcomms_clear_fast_stream();
    }
    return row;
}

bool stream_keep(struct liveshift_stream *row, uint64_t handle) {
    pthread_mutex_lock(&rows);
    if (atomic_load(&row->handle) == handle)
        return true;
    pthread_mutex_unlock(&rows);
    return false;
}

void stream_kept(void) { pthread_mutex_unlock(&rows); }

void stream_destroy_end(struct liveshift_stream *row, uint64_t handle, bool destroyed) {
    if (row != NULL)
        atomic_store(&row->handle, destroyed ? 0 : handle);
}

void streams_reset(int32_t device) {
    struct liveshift_stream *all = table();
    for (uint32_t at = 0; at < atomic_load(&current_gate()->page->streams); at++)
        if (all[at].device == device)
            atomic_store(&all[at].handle, 0);
    vcomms_clear_fast_stream();
}
