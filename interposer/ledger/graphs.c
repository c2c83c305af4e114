/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs.h"

#include "cuda/cuda_real.h"
#include "gate/process.h"
#include "nccl/vcomm.h"
#include "streams.h"

#define MOST 1024

static pthread_mutex_t lists = PTHREAD_MUTEX_INITIALIZER;

/* A list without order. If it has no room, its counter stays too high for ever, which is safe. */
struct list {
    uint64_t items[MOST];
    unsigned count;
};
static struct list captures;     /* captures under way with NCCL in them, by CUDA's numbers */
static struct list into_graphs;  /* streams whose capture adds to a graph that we count already */
static struct list with_nccl[2]; /* graphs; executable ones */

_Atomic uint32_t captures_under_way;

void graphs_forked(void) {
    atomic_store(&captures_under_way, 0);
    lists = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    captures.count = into_graphs.count = with_nccl[0].count = with_nccl[1].count = 0;
}

/* Whether the list contains the item, which is removed if `remove`. */
static bool look_for(struct list *list, uint64_t item, bool remove) {
    pthread_mutex_lock(&lists);
    unsigned at = 0;
    while (at < list->count && list->items[at] != item)
        at++;
    bool found = at < list->count;
    if (found && remove)
        list->items[at] = list->items[--list->count];
    pthread_mutex_unlock(&lists);
    return found;
}

static bool contains(struct list *list, uint64_t item) { return look_for(list, item, false); }

static bool remove_item(struct list *list, uint64_t item) { return look_for(list, item, true); }

static void add_item(struct list *list, uint64_t item) {
    pthread_mutex_lock(&lists);
    if (list->count < MOST)
        list->items[list->count++] = item;
    pthread_mutex_unlock(&lists);
}

static struct liveshift_ledger *totals(void) { return &current_gate()->page->ledger; }

static _Atomic uint64_t *count_of(bool executable) {
    return executable ? &totals()->graph_execs : &totals()->graphs;
}

static void mark_nccl(uint64_t graph, bool executable) {
    if (contains(&with_nccl[executable], graph))
        return;
    add_item(&with_nccl[executable], graph);
    atomic_fetch_add(&totals()->graphs_with_nccl, 1);
}

void capture_begun(uint64_t stream, int32_t device, bool into_graph) {
    struct liveshift_stream *row = stream_row(stream, device);
    if (row == NULL || (atomic_fetch_or(&row->use, STREAM_CAPTURING) & STREAM_CAPTURING) == 0)
        atomic_fetch_add(&captures_under_way, 1);
    vcomms_clear_fast_stream(); /* other streams may join the capture */
    if (into_graph)
        add_item(&into_graphs, stream);
}

void ledger_capture_has_nccl(uint64_t stream) {
    uint64_t capture = capture_number(stream);
    if (capture != 0 && !contains(&captures, capture))
        add_item(&captures, capture);
}

void capture_ended(uint64_t stream, int32_t device, uint64_t capture, uint64_t graph) {
    if (graph == 0 && capture != 0 && capture_number(stream) == capture)
        return; /* CUDA refused, for example in another thread: the capture goes on */
    struct liveshift_stream *row = stream_row(stream, device);
    if (row != NULL && (atomic_fetch_and(&row->use, ~STREAM_CAPTURING) & STREAM_CAPTURING) != 0)
        atomic_fetch_sub(&captures_under_way, 1);
    bool counted = remove_item(&into_graphs, stream);
    bool nccl = capture != 0 && remove_item(&captures, capture);
    if (graph == 0)
        return;
    if (!counted)
        graph_created();
    if (nccl)
        mark_nccl(graph, false);
}

void graph_created(void) { atomic_fetch_add(count_of(false), 1); }

void graph_copied(uint64_t graph, uint64_t copy, bool executable) {
    atomic_fetch_add(count_of(executable), 1);
    if (contains(&with_nccl[false], graph))
        mark_nccl(copy, executable);
}

bool graph_destroy_begin(uint64_t graph, bool executable) {
    if (atomic_load(&process_gate) == NULL)
        return false;
    bool nccl = remove_item(&with_nccl[executable], graph);
    if (atomic_load(count_of(executable)) > 0)
        atomic_fetch_sub(count_of(executable), 1);
    if (nccl)
        atomic_fetch_sub(&totals()->graphs_with_nccl, 1);
    return nccl;
}

void graph_destroy_failed(uint64_t graph, bool executable, bool had_nccl) {
    atomic_fetch_add(count_of(executable), 1);
    if (had_nccl)
        mark_nccl(graph, executable);
}
