// SPDX-License-Identifier: Apache-2.0
//
// Compares the pages in the early CRIU with the plan, which moves them to their place in the tasks.

#include "cold.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>

enum { SAMPLES = 16 }; // at most this many pages of a mapping are compared

// The C library gives each thread one such area, aligned to its size (include/uapi/linux/rseq.h).
// When a thread goes on at another processor, the kernel writes the processor's number into it.
// This can happen while CRIU's own code still runs in a restored thread. No other word of the task
// changes before the task runs.
struct rseq_area {
    uint32_t cpu_id_start, cpu_id;
    uint64_t rseq_cs;
    uint32_t flags, node_id, mm_cid, unused;
};

uint64_t store_preplaced(struct store *s) {
    uint64_t placed = 0;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->images; i++) {
        const struct page_map *map = store_find_process(s, s->image[i].pid);
        if (map == NULL || map->incarnation != s->image[i].incarnation)
            continue;
        for (uint32_t k = 0; k < map->size; k++)
            if (map->table[k] != NULL)
                placed += (uint64_t)__builtin_popcountll(map->table[k]->preplaced);
    }
    pthread_mutex_unlock(&s->lock);
    return placed;
}

static const struct plan_vma *vma_at(const struct plan *plan, const struct plan_process *process,
                                     uint64_t address) {
    const struct plan_vma *vma = plan_vmas(plan) + process->first;
    uint32_t low = 0, high = process->count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (vma[middle].start + vma[middle].size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < process->count && vma[low].start <= address ? &vma[low] : NULL;
}

static const struct plan_process *process_of(const struct plan *plan, uint32_t pid) {
    const struct plan_process *process = plan_processes(plan);
    for (uint32_t i = 0; i < plan->processes; i++)
        if (process[i].pid == pid)
            return &process[i];
    return NULL;
}

// Returns the bits of the leaf's pages in mappings that will be moved (moved false), or that were
// moved (moved true). A mapping may begin or end within the leaf.
static uint64_t covered(const struct plan *plan, uint32_t pid, const struct leaf *leaf,
                        bool moved) {
    const struct plan_process *process = process_of(plan, pid);
    uint64_t found = 0, at = (leaf->number << LEAF_BITS) * PAGE, end = at + LEAF_PAGES * PAGE;
    while (process != NULL && at < end) {
        const struct plan_vma *vma = vma_at(plan, process, at);
        uint64_t next = at + PAGE;
        if (vma != NULL && (moved ? vma->placed != 0 : vma->source != 0)) {
            next = vma->start + vma->size < end ? vma->start + vma->size : end;
            found |= page_bits(at / PAGE, next / PAGE);
        }
        at = next;
    }
    return found;
}

uint64_t cold_planned(const struct plan *plan, uint32_t pid, const struct leaf *leaf) {
    return covered(plan, pid, leaf, false);
}

uint64_t cold_preplaced(const struct plan *plan, struct page_map *map, uint64_t page) {
    const struct leaf *leaf = page_map_leaf(map, page);
    if (leaf == NULL || leaf->preplaced == 0)
        return 0;
    return covered(plan, map->pid, leaf, true) & leaf->preplaced;
}

// Whether the pages differ only in the processor's number of one thread.
static bool on_another_processor(const uint8_t *seen, const uint8_t *right) {
    size_t at = 0;
    while (seen[at] == right[at])
        at++;
    at -= at % sizeof(struct rseq_area);
    struct rseq_area now, before;
    memcpy(&now, seen + at, sizeof now);
    memcpy(&before, right + at, sizeof before);
    size_t rest = at + sizeof now;
    uint32_t processors = (uint32_t)get_nprocs_conf();
    return memcmp(seen + rest, right + rest, PAGE - rest) == 0 && now.cpu_id == now.cpu_id_start &&
           now.cpu_id < processors && before.cpu_id == before.cpu_id_start &&
           before.cpu_id < processors && (now.rseq_cs == before.rseq_cs || now.rseq_cs == 0) &&
           now.flags == before.flags &&
           (now.node_id == before.node_id || now.node_id < processors) &&
           (now.mm_cid == before.mm_cid || now.mm_cid < processors) && now.unused == before.unused;
}

static int sample(const struct store *s, uint32_t pid, int task, const struct leaf *leaf,
                  uint64_t placed, char *why) {
    static const uint8_t zeros[PAGE];
    uint8_t page[PAGE];
    int i = __builtin_ctzll(placed);
    uint64_t address = ((leaf->number << LEAF_BITS) + (uint64_t)i) * PAGE;
    struct iovec here = {page, PAGE}, there = {(void *)(uintptr_t)address, PAGE};
    if (process_vm_readv(task, &here, 1, &there, 1, 0) != PAGE)
        FAIL("process %" PRIu32 ": what was placed at %#" PRIx64 " cannot be read: %s", pid,
             address, strerror(errno));
    const uint8_t *right = leaf->page[i] == PAGE_ZERO ? zeros : store_content(s, leaf->page[i]);
    if (memcmp(page, right, PAGE) != 0 && !on_another_processor(page, right))
        FAIL("process %" PRIu32 ": another page was placed at %#" PRIx64, pid, address);
    return 0;
}

int store_verify_preplaced(struct store *s, const struct plan *plan, uint32_t pid, int task,
                           char *why) {
    const struct plan_process *process = process_of(plan, pid);
    struct page_map *map = store_find_process(s, pid);
    const struct plan_vma *vma = process != NULL ? plan_vmas(plan) + process->first : NULL;
    for (uint32_t i = 0; map != NULL && vma != NULL && i < process->count; i++) {
        if (!vma[i].placed)
            continue;
        uint64_t first = vma[i].start / PAGE, pages = vma[i].size / PAGE;
        for (uint64_t k = 0; k < SAMPLES; k++) {
            uint64_t page = first + pages * k / SAMPLES;
            uint64_t placed = cold_preplaced(plan, map, page);
            struct leaf *leaf = placed ? page_map_leaf(map, page) : NULL;
            placed = leaf != NULL ? placed & ~leaf->evicted : 0;
            if (placed && sample(s, pid, task, leaf, placed, why) != 0)
                return -1;
        }
    }
    return 0;
}
