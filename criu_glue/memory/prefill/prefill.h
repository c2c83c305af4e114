// SPDX-License-Identifier: Apache-2.0
//
// The protocol between the agent (prefill.py) and the library that is preloaded into an early CRIU
// (prefill_shim.c).

#pragma once

#include "store/page_map.h"

#include <stdatomic.h>
#include <stdint.h>

// Each order of the agent is one message, and the library answers it with one message.
enum prefill_op {
    PREFILL_MAP,  // reserve address space for [low, high) and map [start, end) in it
    PREFILL_GROW, // also map [start, end), which is reserved already
    PREFILL_COPY, // copy one block; for each page: its slot, PAGE_ZERO, or PAGE_UNKNOWN (keep it)
    PREFILL_WRITE_BACK, // write the pages of one block that have a slot into the store; free them
    PREFILL_DISCARD,    // free the listed ranges
    PREFILL_RESTORE,    // begin the restore; the plan is complete
};

struct prefill_order {
    uint32_t op;
    uint32_t count; // PREFILL_COPY, PREFILL_WRITE_BACK: slots; PREFILL_DISCARD: ranges
    uint64_t start, end, low, high;
    int64_t shift; // address in the early CRIU minus address in the job
};

struct prefill_answer {
    int64_t error; // 0, or a negative errno
    int64_t shift; // of the new reservation; for PREFILL_MAP only
};

struct prefill_discard {
    uint64_t address;
    uint64_t pages;
};

// The plan lies in memory that the agent and the library share. It lists the mappings that CRIU
// makes for each process, in CRIU's order.
enum { PLAN_MAGIC = 0x4c50534c };

struct plan_vma {
    uint64_t start, size;
    uint64_t source; // its address in the early CRIU; 0: nothing of it is there
    uint32_t unused;
    _Atomic uint32_t placed; // the library sets this once the memory is in the task
};

struct plan_process {
    uint32_t pid, first, count, unused;
    uint64_t total;     // bytes that CRIU reserves
    uint64_t base_rest; // the library reserves at an address with this rest, modulo BLOCK
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
