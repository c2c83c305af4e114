/* SPDX-License-Identifier: Apache-2.0 */
#include "vcomm.h"

#include "ledger/graphs.h"

#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct vcomm *vcomms;
pthread_mutex_t vcomms_lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic(const char *) vcomms_unsafe;

static struct vcomm *ended; /* never freed: some hundred bytes each; under vcomms_lock */

struct vcomm *vcomm_new(void) {
    struct vcomm *v = calloc(1, sizeof *v);
    if (v == NULL)
        return NULL;
    v->magic = VCOMM_MAGIC;
    v->device = v->rank = -1;
    v->fast_stream = FAST_STREAM_NONE;
    v->gate = current_gate();
    pthread_mutex_init(&v->records, NULL);
    return v;
}

void vcomm_list(struct vcomm *v, bool pending) {
    struct gate *gate = current_gate();
    if (v->row == NULL && v->id != 0) {
        struct communicator_info made = {
            .library = LIVESHIFT_NCCL,
            .id = v->id,
            .parent = v->parent,
            .size = v->size,
            .rank = v->rank,
            .device = v->device,
            .made_by = v->made_by,
            .name = config_name(v->config),
            .pending = pending,
        };
        v->row = communicator_add(gate, &made);
        if (v->row != NULL)
            v->clock = clock_add(gate, v->row, -1, -1);
    }
    pthread_mutex_lock(&vcomms_lock);
    struct vcomm **end = &vcomms;
    while (*end != NULL && *end != v)
        end = &(*end)->next;
    *end = v;
    pthread_mutex_unlock(&vcomms_lock);
}

#define FREE_LIST(list)                                                                            \
    for (void *next; (list) != NULL; (list) = next) {                                              \
        next = (list)->next;                                                                       \
        free(list);                                                                                \
    }

static void free_records(struct vcomm *v) {
    FREE_LIST(v->registrations);
    FREE_LIST(v->windows);
    FREE_LIST(v->reductions);
    config_free(v->config);
    config_free(v->creation.given);
    free(v->creation.ids);
    free(v->creation.excluded);
    free(atomic_load(&v->pairs));
    v->config = v->creation.given = NULL;
    v->creation.ids = NULL;
    v->creation.excluded = NULL;
    atomic_store(&v->pairs, NULL);
}

void vcomm_end(struct vcomm *v) {
    pthread_mutex_lock(&vcomms_lock);
    struct vcomm **at = &vcomms;
    while (*at != NULL && *at != v)
        at = &(*at)->next;
    if (*at == v)
        *at = v->next;
    v->next = ended;
    ended = v;
    pthread_mutex_unlock(&vcomms_lock);
    bool down = atomic_exchange(&v->state, VCOMM_ENDED) == VCOMM_DOWN;
    atomic_store(&v->fast_stream, FAST_STREAM_NONE);
    v->clock = NULL;
    if (v->row != NULL) /* v->row stays: a thread may be inside a call when the vcomm is aborted */
        communicator_end(current_gate(), v->row);
    if (down) /* a teardown or rebuild may still read what is known of it */
        return;
    v->real = NULL;
    pthread_mutex_lock(&v->records);
    free_records(v);
    pthread_mutex_unlock(&v->records);
}

struct liveshift_clock *vcomm_pair(struct vcomm *v, int peer, bool sends) {
    if (v->row == NULL || peer < 0 || peer >= v->size)
        return NULL;
    pair_clock *pairs = atomic_load(&v->pairs);
    if (pairs == NULL) {
        pthread_mutex_lock(&v->records);
        pairs = atomic_load(&v->pairs);
        if (pairs == NULL) {
            pairs = calloc(2 * (size_t)v->size, sizeof *pairs);
            atomic_store(&v->pairs, pairs);
        }
        pthread_mutex_unlock(&v->records);
        if (pairs == NULL)
            return NULL;
    }
    pair_clock *place = &pairs[sends ? peer : v->size + peer];
    struct liveshift_clock *clock = atomic_load_explicit(place, memory_order_acquire);
    if (clock != NULL)
        return clock;
    pthread_mutex_lock(&v->records);
    clock = atomic_load(place);
    if (clock == NULL) {
        clock = clock_add(current_gate(), v->row, sends ? v->rank : peer, sends ? peer : v->rank);
        atomic_store_explicit(place, clock, memory_order_release);
    }
    pthread_mutex_unlock(&v->records);
    return clock;
}

void vcomm_set_fast_stream(struct vcomm *v, nccl_stream stream) {
    if (atomic_load(&v->state) != VCOMM_LIVE || atomic_load(&captures_under_way) != 0)
        return;
    atomic_store(&v->fast_stream, (uintptr_t)stream);
    if (atomic_load(&v->state) != VCOMM_LIVE || atomic_load(&captures_under_way) != 0)
        atomic_store(&v->fast_stream, FAST_STREAM_NONE);
}

void vcomms_clear_fast_stream(void) {
    pthread_mutex_lock(&vcomms_lock);
    for (struct vcomm *v = vcomms; v != NULL; v = v->next)
        atomic_store(&v->fast_stream, FAST_STREAM_NONE);
    pthread_mutex_unlock(&vcomms_lock);
}

void vcomms_forked(void) {
    vcomms_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    vcomms = NULL;
}

bool vcomm_enter(struct vcomm *v) {
    atomic_fetch_add(&v->uses, 1);
    uint32_t state = atomic_load(&v->state);
    if (state == VCOMM_LIVE || state == VCOMM_MAKING || state == VCOMM_BROKEN)
        return true;
    vcomm_leave(v);
    return false;
}

bool vcomm_enter_waiting(struct vcomm *v) {
    static const struct timespec look = {0, 20000000};
    struct liveshift_page *page = current_gate()->page;
    for (;;) {
        uint32_t check = atomic_load(&page->order.check);
        if (vcomm_enter(v))
            return true;
        if (atomic_load(&v->state) == VCOMM_ENDED || atomic_load(&page->answer.down) == 0)
            return vcomm_enter(v); /* a rebuild may have ended between the two looks */
        syscall(SYS_futex, &page->order.check, FUTEX_WAIT, check, &look, NULL, 0);
    }
}

void vcomm_unsafe(struct vcomm *v, const char *why) {
    if (v->row == NULL)
        return;
    pthread_mutex_lock(&v->records);
    if (v->row->unsafe[0] == '\0')
        snprintf(v->row->unsafe, sizeof v->row->unsafe, "%s", why);
    pthread_mutex_unlock(&v->records);
}

bool vcomm_is_unsafe(struct vcomm *v, char why[static VCOMM_WHY]) {
    struct liveshift_communicator *row = v->row;
    why[0] = '\0';
    if (row != NULL) {
        pthread_mutex_lock(&v->records);
        snprintf(why, VCOMM_WHY, "%s", row->unsafe);
        pthread_mutex_unlock(&v->records);
    }
    return why[0] != '\0';
}

static const char captured[] = "NCCL operations of it were captured into a CUDA graph";

void vcomm_captured(struct vcomm *v) {
    if (!atomic_exchange(&v->captured, true))
        vcomm_unsafe(v, captured);
}

void vcomm_not_captured(struct vcomm *v) {
    if (!atomic_exchange(&v->captured, false) || v->row == NULL)
        return;
    pthread_mutex_lock(&v->records);
    if (strcmp(v->row->unsafe, captured) == 0)
        v->row->unsafe[0] = '\0';
    pthread_mutex_unlock(&v->records);
}
