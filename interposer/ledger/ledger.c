/* SPDX-License-Identifier: Apache-2.0 */
#include "ledger.h"

#include "cuda/cuda_real.h"
#include "gate/process.h"
#include "graphs.h"
#include "ledger_rows.h"
#include "nccl/vcomm.h"
#include "streams.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#define BUCKETS 65536
#define LOCKS 64

/* The data of a row that the page doesn't hold. */
struct entry {
    uint64_t address;
    uint32_t key;     /* enum ledger_key; 0: not in the index */
    uint32_t next;    /* row + 1 in the chain */
    uint32_t linked;  /* row + 1: the memory that a mapping maps; else the exported row of this */
    uint32_t handles; /* handles of physical memory; how often an IPC handle was opened; or 1 */
    _Atomic uint32_t references; /* `handles` plus mappings: the row stays until this is 0 */
};

struct index {
    uint32_t chains[BUCKETS]; /* row + 1 */
    struct entry entries[LIVESHIFT_PAGE_ALLOCATIONS];
};

static _Atomic(struct index *) current_index;
static struct {
    pthread_mutex_t mutex;
    char own_line[64 - sizeof(pthread_mutex_t)];
} locks[LOCKS] = {[0 ... LOCKS - 1] = {.mutex = PTHREAD_MUTEX_INITIALIZER}};
_Static_assert(sizeof locks[0] == 64, "a lock is a cache line");

static void reset_locks(void) {
    for (unsigned i = 0; i < LOCKS; i++)
        locks[i].mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

static void after_fork_in_child(void) {
    if (atomic_load(&process_gate) == NULL)
        return; /* no page: nothing was recorded, and no lock was taken */
    struct index *index = atomic_load(&current_index);
    if (index != NULL) /* clears it without touching the pages that the parent has touched */
        madvise(index, sizeof *index, MADV_DONTNEED);
    reset_locks();
    rows_forked();
    streams_forked();
    graphs_forked();
    vcomms_forked();
}

/* Runs before process.c's handler, which takes the page away. */
AT_FORK(FORK_LEDGER, NULL, NULL, after_fork_in_child)

/* May run in several threads at once. */
static struct index *make_index(void) {
    struct index *expected = NULL,
                 *index = mmap(NULL, sizeof *index, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (index == MAP_FAILED)
        return NULL; /* the allocation counts as missed */
    /* A CUDA call has succeeded, so the driver is loaded by now. */
    atomic_store(&current_gate()->page->ledger.driver, driver_version());
    if (atomic_compare_exchange_strong(&current_index, &expected, index))
        return index;
    munmap(index, sizeof *index);
    return expected;
}

static struct index *get_index(void) {
    struct index *index = atomic_load_explicit(&current_index, memory_order_acquire);
    return __builtin_expect(index != NULL, 1) ? index : make_index();
}

/* CUDA's addresses are aligned to at least 256 bytes; handles can be any number. */
static uint32_t bucket_of(uint32_t key, uint64_t address) {
    return (uint32_t)(((address + key) * 0x9e3779b97f4a7c15u) >> 48) % BUCKETS;
}

/* Takes the lock of the chain in which the key and address are. */
static pthread_mutex_t *lock_of(uint32_t key, uint64_t address) {
    pthread_mutex_t *mutex = &locks[bucket_of(key, address) % LOCKS].mutex;
    pthread_mutex_lock(mutex);
    return mutex;
}

/* The link in the chain that leads to the entry, or the chain's end. Under the chain's lock. */
static uint32_t *link_to(struct index *index, uint32_t key, uint64_t address) {
    uint32_t *link = &index->chains[bucket_of(key, address)];
    while (*link != 0) {
        struct entry *entry = &index->entries[*link - 1];
        if (entry->address == address && entry->key == key)
            break;
        link = &entry->next;
    }
    return link;
}

static void insert(struct index *index, uint32_t row) {
    struct entry *entry = &index->entries[row];
    uint32_t *chain = &index->chains[bucket_of(entry->key, entry->address)];
    entry->next = *chain;
    *chain = row + 1;
}

/* Drops one reference to a row. The last one frees the row, and drops the row's reference to the
   linked row. */
static void drop_reference(struct index *index, uint32_t row) {
    while (atomic_fetch_sub(&index->entries[row].references, 1) == 1) {
        uint32_t linked = index->entries[row].linked;
        index->entries[row].key = 0;
        index->entries[row].linked = 0;
        row_free(row);
        if (linked == 0)
            return;
        row = linked - 1;
    }
}

/* Takes a row of the page, without an entry in the index yet. False: there is no room. */
static bool new_row(struct index *index, uint32_t key, const struct ledger_record *made,
                    uint32_t *row) {
    struct liveshift_ledger *totals = &current_gate()->page->ledger;
    uint64_t serial = atomic_fetch_add_explicit(&totals->made, 1, memory_order_relaxed) + 1;
    if (index == NULL || !row_allocate(row)) {
        atomic_fetch_add_explicit(&totals->missed, 1, memory_order_relaxed);
        return false;
    }
    struct entry *entry = &index->entries[*row];
    entry->address = made->address;
    entry->key = key;
    entry->linked = 0;
    entry->handles = 1;
    atomic_store_explicit(&entry->references, 1, memory_order_relaxed);
    row_write(*row, made, serial);
    return true;
}

static void add(enum ledger_key key, const struct ledger_record *made, uint32_t of) {
    struct index *index = get_index();
    uint32_t row, stale = 0;
    if (!new_row(index, key, made, &row)) {
        if (of != 0)
            drop_reference(index, of - 1);
        return;
    }
    index->entries[row].linked = of;
    pthread_mutex_t *lock = lock_of(key, made->address);
    uint32_t *link = link_to(index, key, made->address);
    if (*link != 0 && key == LEDGER_OPENED) { /* one row, counted */
        uint32_t known = *link - 1;
        index->entries[known].handles++;
        atomic_fetch_add(&index->entries[known].references, 1);
        stale = row + 1;
    } else {
        if (*link != 0) { /* the old one was freed in a way that we don't see */
            stale = *link;
            *link = index->entries[stale - 1].next;
        }
        insert(index, row);
    }
    pthread_mutex_unlock(lock);
    if (stale != 0)
        drop_reference(index, stale - 1);
}

void ledger_add(enum ledger_key key, const struct ledger_record *made) { add(key, made, 0); }

struct ledger_free ledger_free_begin(enum ledger_key key, uint64_t address) {
    struct ledger_free leaving = {0};
    struct index *index = atomic_load_explicit(&current_index, memory_order_acquire);
    if (index == NULL)
        return leaving;
    pthread_mutex_t *lock = lock_of(key, address);
    uint32_t *link = link_to(index, key, address);
    if (*link != 0) {
        leaving.row = *link;
        struct entry *entry = &index->entries[*link - 1];
        leaving.last = --entry->handles == 0;
        if (leaving.last)
            *link = entry->next;
    }
    pthread_mutex_unlock(lock);
    return leaving;
}

void ledger_free_end(struct ledger_free leaving, bool freed) {
    struct index *index = atomic_load_explicit(&current_index, memory_order_acquire);
    if (leaving.row == 0 || index == NULL)
        return;
    uint32_t row = leaving.row - 1;
    if (freed) {
        drop_reference(index, row);
        return;
    }
    struct entry *entry = &index->entries[row];
    pthread_mutex_t *lock = lock_of(entry->key, entry->address);
    entry->handles++;
    if (leaving.last)
        insert(index, row);
    pthread_mutex_unlock(lock);
}

bool ledger_find(enum ledger_key key, uint64_t address, struct ledger_record *found) {
    struct index *index = get_index();
    if (index == NULL)
        return false;
    pthread_mutex_t *lock = lock_of(key, address);
    uint32_t at = *link_to(index, key, address);
    if (at != 0 && found != NULL)
        row_read(at - 1, found);
    pthread_mutex_unlock(lock);
    return at != 0;
}

void ledger_exported(enum ledger_key key, uint64_t address, uint64_t flags) {
    struct index *index = get_index();
    if (index == NULL)
        return;
    struct ledger_record made = {LIVESHIFT_MEMORY_EXPORTED, -1, address, 0, 0, 0, flags};
    pthread_mutex_t *lock = lock_of(key, address);
    uint32_t at = *link_to(index, key, address);
    struct entry *of = at != 0 ? &index->entries[at - 1] : NULL;
    if (of == NULL || of->linked == 0) {
        struct ledger_record source = {.device = -1};
        uint32_t row;
        if (at != 0)
            row_read(at - 1, &source);
        made.device = source.device;
        made.size = source.size;
        made.handle = key == LEDGER_HANDLE ? address : 0;
        /* Without its source's row, no call removes this row again, which is safe. */
        if (new_row(index, 0, &made, &row) && of != NULL)
            of->linked = row + 1;
    }
    pthread_mutex_unlock(lock);
}

void ledger_retained(uint64_t handle) {
    struct index *index = get_index();
    if (index == NULL)
        return;
    pthread_mutex_t *lock = lock_of(LEDGER_HANDLE, handle);
    uint32_t at = *link_to(index, LEDGER_HANDLE, handle);
    if (at != 0) {
        index->entries[at - 1].handles++;
        atomic_fetch_add(&index->entries[at - 1].references, 1);
    }
    pthread_mutex_unlock(lock);
}

void ledger_mapped(uint64_t address, uint64_t size, uint64_t handle, uint64_t flags) {
    struct index *index = get_index();
    if (index == NULL)
        return;
    struct ledger_record made = {LIVESHIFT_MEMORY_MAPPED, -1, address, size, handle, 0, flags};
    pthread_mutex_t *lock = lock_of(LEDGER_HANDLE, handle);
    uint32_t of = *link_to(index, LEDGER_HANDLE, handle);
    if (of != 0) {
        struct ledger_record physical;
        row_read(of - 1, &physical);
        made.device = physical.device;
        if (physical.size == 0) /* imported memory: its size was unknown */
            row_resize(of - 1, size);
        atomic_fetch_add(&index->entries[of - 1].references, 1);
    }
    pthread_mutex_unlock(lock);
    add(LEDGER_MAPPED, &made, of);
}

void ledger_unmapped(uint64_t address, uint64_t size) {
    for (uint64_t at = address; at - address < size;) {
        struct ledger_record mapped;
        if (!ledger_find(LEDGER_MAPPED, at, &mapped) || mapped.size == 0)
            return;
        ledger_free_end(ledger_free_begin(LEDGER_MAPPED, at), true);
        at += mapped.size;
    }
}

/* Whether cudaDeviceReset frees this kind: not pool memory and the driver's virtual memory. */
static bool frees(enum liveshift_memory kind) {
    return kind == LIVESHIFT_MEMORY_DEVICE || kind == LIVESHIFT_MEMORY_ARENA ||
           kind == LIVESHIFT_MEMORY_MANAGED || kind == LIVESHIFT_MEMORY_PINNED ||
           kind == LIVESHIFT_MEMORY_REGISTERED || kind == LIVESHIFT_MEMORY_IMPORTED;
}

void ledger_reset(int32_t device) {
    struct ledger_record made;
    for (uint32_t row = 0; row_read(row, &made); row++)
        if (frees(made.kind) && made.device == device && made.handle == 0) {
            enum ledger_key key = made.kind == LIVESHIFT_MEMORY_REGISTERED ? LEDGER_REGISTERED
                                  : made.kind == LIVESHIFT_MEMORY_IMPORTED ? LEDGER_OPENED
                                                                           : LEDGER_POINTER;
            struct ledger_free leaving;
            do {
                leaving = ledger_free_begin(key, made.address);
                ledger_free_end(leaving, true);
            } while (leaving.row != 0 && !leaving.last);
        }
    streams_reset(device);
}
