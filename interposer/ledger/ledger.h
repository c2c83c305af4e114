/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ledger: what this process holds of CUDA's memory, as rows of the page; page.h has their form.
 *
 * A row is found again, when its memory is freed, by name and address in an index of this process's
 * own: 65,536 chains under 64 locks, each held for a few instructions and never across a call. What
 * is freed leaves the index before the call that frees it, because the address may belong to
 * another thread's allocation before that call is back; the row stays until the call has succeeded.
 *
 * Recording never fails a call: where there is no room, `missed` says so. A forked child begins
 * empty (CUDA doesn't work in it anyway), an exec'ed program has a page of its own.
 */
#ifndef LIVESHIFT_INTERPOSER_LEDGER_H
#define LIVESHIFT_INTERPOSER_LEDGER_H

#include "gate/page.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The kind of name that finds a row. A function that frees takes one kind of name, no matter which
   function allocated. */
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
    uint32_t row;   /* row + 1; 0: the allocation isn't known */
    bool last;      /* this is its last holder, so the row goes when the call succeeds */
    uint64_t which; /* name and address */
};

void ledger_add(enum ledger_key name, const struct ledger_record *made);

/* A hook calls ledger_free_begin before the call that frees, and ledger_free_end after it. */
struct ledger_free ledger_free_begin(enum ledger_key name, uint64_t address);
void ledger_free_end(struct ledger_free leaving, bool freed);

/* Whether the ledger knows an allocation of that name; `found`, unless NULL, gets the row. */
bool ledger_find(enum ledger_key name, uint64_t address, struct ledger_record *found);

/* The process gave away an IPC or shareable handle of this allocation. The ledger adds an exported
   row, which stays as long as the allocation's own row. */
void ledger_exported(enum ledger_key name, uint64_t address, uint64_t flags);

/* Physical memory. retained: the driver gave out another handle of it. mapped: it was mapped at an
   address. unmapped: nothing is mapped in this range any more. Physical memory lives while it has a
   handle or a mapping. */
void ledger_retained(uint64_t handle);
void ledger_mapped(uint64_t address, uint64_t size, uint64_t handle, uint64_t flags);
void ledger_unmapped(uint64_t address, uint64_t size);

/* The device was reset: forgets what cudaDeviceReset frees. */
void ledger_reset(int32_t device);

#endif
