// SPDX-License-Identifier: Apache-2.0
//
// What the agent tells the library that is preloaded into an early CRIU (prefill_shim.c). The
// agent's side in Python is prefill.py.

#pragma once

#include "store/page_map.h"

#include <stdatomic.h>
#include <stdint.h>

// Orders, one message each and one answer.
enum prefill_op {
    PREFILL_MAP,  // reserve [low, high) somewhere and have [start, end) in it
    PREFILL_GROW, // have [start, end) too, which was reserved
    PREFILL_COPY, // one block: of each page PAGE_UNKNOWN (what lies there stays) or what it is
    PREFILL_BACK, // one block: write each page that has a slot there, and let go of it
    PREFILL_DROP, // let go of what is listed
    PREFILL_GO,   // restore; the plan is there
};

struct prefill_order {
    uint32_t op;
    uint32_t count; // PREFILL_COPY, PREFILL_BACK: slots; PREFILL_DROP: ranges
    uint64_t start, end, low, high;
    int64_t shift; // from the job's addresses to those in CRIU
};

struct prefill_answer {
    int64_t error; // 0, or a negative errno
    int64_t shift; // PREFILL_MAP
};

struct prefill_drop {
    uint64_t address;
    uint64_t pages;
};

// The plan, in memory that both share: what CRIU maps for each process, in its order.
enum {
    PLAN_MAGIC = 0x4c50534c,
    VMA_GROWS_DOWN = 1, // CRIU maps a page more, in front
};

struct plan_vma {
    uint64_t start, size;
    uint64_t source; // where it lies in CRIU; 0: nowhere
    uint32_t flags;
    _Atomic uint32_t placed; // the library: it is in the task now
};

struct plan_process {
    uint32_t pid, first, count;
    _Atomic uint32_t trouble; // the library: CRIU did not map what was expected
    uint64_t total;           // bytes that CRIU reserves, guard pages not counted
    uint64_t base_rest;       // of the address that it is to reserve, by the size of a block
};

struct plan {
    uint32_t magic, processes, vmas, unused;
    // struct plan_process[processes], struct plan_vma[vmas]
};

static inline struct plan_process *plan_processes(const struct plan *plan) {
    return (struct plan_process *)(plan + 1);
}

static inline struct plan_vma *plan_vmas(const struct plan *plan) {
    return (struct plan_vma *)(plan_processes(plan) + plan->processes);
}
