/* SPDX-License-Identifier: Apache-2.0 */
#include "ledger_rows.h"

#include "gate/process.h"

/* The free rows, a stack. The low half is the top row + 1. The high half is a number that changes
   with every push: so a thread notices that a row left the stack and came back. */
static _Atomic uint64_t free_rows;
static _Atomic uint32_t
    next_free[LIVESHIFT_PAGE_ALLOCATIONS]; /* row + 1; touched as rows are freed */

/* Held while the table grows. */
static pthread_mutex_t growing = PTHREAD_MUTEX_INITIALIZER;

void rows_forked(void) {
    atomic_store(&free_rows, 0);
    growing = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

void warn_no_row(const char *what, const char *why) {
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    process_warn_full(&warned, what, why, "its device state is not known in full");
}

static bool pop(uint32_t *row) {
    uint64_t top = atomic_load_explicit(&free_rows, memory_order_acquire);
    while ((uint32_t)top != 0) {
        uint32_t next = atomic_load_explicit(&next_free[(uint32_t)top - 1], memory_order_relaxed);
        uint64_t then = (top & ~(uint64_t)UINT32_MAX) | next;
        if (atomic_compare_exchange_weak(&free_rows, &top, then)) {
            *row = (uint32_t)top - 1;
            return true;
        }
    }
    return false;
}

static bool grow(uint32_t *row) {
    struct gate *gate = current_gate();
    struct liveshift_ledger *totals = &gate->page->ledger;
    pthread_mutex_lock(&growing);
    uint32_t used = atomic_load(&totals->rows);
    const char *why =
        process_next_row(gate, used, LIVESHIFT_PAGE_ALLOCATIONS, LIVESHIFT_ALLOCATIONS_AT,
                         sizeof(struct liveshift_allocation));
    if (why == NULL)
        atomic_store(&totals->rows, used + 1);
    pthread_mutex_unlock(&growing);
    *row = used;
    if (why != NULL)
        warn_no_row("allocation", why);
    return why == NULL;
}

bool row_allocate(uint32_t *row) { return pop(row) || grow(row); }

static struct liveshift_allocation *row_at(uint32_t row) {
    return &liveshift_allocations(current_gate()->page)[row];
}

void row_write(uint32_t row, const struct ledger_record *made, uint64_t serial) {
    struct liveshift_allocation *to = row_at(row);
    atomic_store_explicit(&to->address, made->address, memory_order_relaxed);
    atomic_store_explicit(&to->size, made->size, memory_order_relaxed);
    atomic_store_explicit(&to->handle, made->handle, memory_order_relaxed);
    atomic_store_explicit(&to->stream, made->stream, memory_order_relaxed);
    atomic_store_explicit(&to->device, made->device, memory_order_relaxed);
    atomic_store_explicit(&to->flags, made->flags, memory_order_relaxed);
    atomic_store_explicit(&to->serial, serial, memory_order_relaxed);
    atomic_store_explicit(&to->kind, made->kind, memory_order_release);
}

void row_resize(uint32_t row, uint64_t size) { atomic_store(&row_at(row)->size, size); }

void row_free(uint32_t row) {
    atomic_store_explicit(&row_at(row)->kind, LIVESHIFT_MEMORY_FREE, memory_order_release);
    atomic_fetch_add_explicit(&current_gate()->page->ledger.freed, 1, memory_order_relaxed);
    uint64_t top = atomic_load_explicit(&free_rows, memory_order_relaxed), then;
    do {
        atomic_store_explicit(&next_free[row], (uint32_t)top, memory_order_relaxed);
        then = (((top >> 32) + 1) << 32) | (row + 1);
    } while (!atomic_compare_exchange_weak(&free_rows, &top, then));
}

bool row_read(uint32_t row, struct ledger_record *found) {
    if (row >= atomic_load(&current_gate()->page->ledger.rows))
        return false;
    struct liveshift_allocation *from = row_at(row);
    found->kind = atomic_load_explicit(&from->kind, memory_order_acquire);
    found->device = atomic_load_explicit(&from->device, memory_order_relaxed);
    found->address = atomic_load_explicit(&from->address, memory_order_relaxed);
    found->size = atomic_load_explicit(&from->size, memory_order_relaxed);
    found->handle = atomic_load_explicit(&from->handle, memory_order_relaxed);
    found->stream = atomic_load_explicit(&from->stream, memory_order_relaxed);
    found->flags = atomic_load_explicit(&from->flags, memory_order_relaxed);
    return true;
}
