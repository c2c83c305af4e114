/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ledger: the CUDA memory of this process, as rows of the page. page.h describes a row.
 *
 * When memory is freed, the ledger finds its row by key and address in an index of this process.
 * The index has 65,536 chains under 64 locks. A thread holds a lock for a few instructions, and
 * never across a call. An allocation leaves the index before the call that frees it, because
 * another thread's allocation may get the address before that call returns. The row stays until the
 * call has succeeded.
 *
 * Recording never makes a call fail. If there is no room, `missed` counts the allocation. A forked
 * child begins with an empty ledger, since CUDA does not work in it. An exec'ed program has its own
 * page.
 */
#ifndef LIVESHIFT_INTERPOSER_LEDGER_H
#define LIVESHIFT_INTERPOSER_LEDGER_H

#include "gate/page.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The kind of key by which a row is found. A function that frees memory takes one kind of key, no
   matter which function allocated the memory. */
enum ledger_key {
    LEDGER_POINTER = 1, /* device, pool, managed and pinned memory */
    LEDGER_REGISTERED,  /* cudaHostRegister */
    LEDGER_RESERVED,    /* cuMemAddressReserve */
    LEDGER_HANDLE,      /* physical memory, imported or made here, and multicast objects */
    LEDGER_MAPPED,      /* cuMemMap */
    LEDGER_OPENED,      /* cudaIpcOpenMemHandle; counted: opened twice must be closed twice */
    LEDGER_POOL,        /* memory pools that were imported or exported, by pool */
    LEDGER_EVENT,       /* events with an IPC handle */
    LEDGER_NCCL,        /* ncclMemAlloc */
};

/* What a hook records about an allocation; see struct liveshift_allocation. */
struct ledger_record {
    enum liveshift_memory kind;
    int32_t device; /* -1: none */
    uint64_t address, size, handle, stream, flags;
};

/* An allocation that is about to be freed. */
struct ledger_free {
    uint32_t row; /* row + 1; 0: the allocation isn't known */
    bool last;    /* this is its last holder, so the row goes when the call succeeds */
};

void ledger_add(enum ledger_key key, const struct ledger_record *made);

/* A hook calls ledger_free_begin before the call that frees, and ledger_free_end after it. */
struct ledger_free ledger_free_begin(enum ledger_key key, uint64_t address);
void ledger_free_end(struct ledger_free leaving, bool freed);

/* Whether the ledger has an allocation of that key; `found`, unless NULL, gets the row. */
bool ledger_find(enum ledger_key key, uint64_t address, struct ledger_record *found);

/* The process gave away an IPC or shareable handle of this allocation. The ledger adds an exported
   row, which stays as long as the allocation's own row. */
void ledger_exported(enum ledger_key key, uint64_t address, uint64_t flags);

/* Physical memory. retained: the driver gave out another handle of it. mapped: it was mapped at an
   address. unmapped: nothing is mapped in this range any more. Physical memory lives while it has a
   handle or a mapping. */
void ledger_retained(uint64_t handle);
void ledger_mapped(uint64_t address, uint64_t size, uint64_t handle, uint64_t flags);
void ledger_unmapped(uint64_t address, uint64_t size);

/* The device was reset: forgets what cudaDeviceReset frees. */
void ledger_reset(int32_t device);

#endif
