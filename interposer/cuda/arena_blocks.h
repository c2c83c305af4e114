/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena's blocks: a table in this process's own memory. The application's threads add, find and
 * remove blocks under a mutex, never held across a call. The service thread, which may run while a
 * thread is stopped that holds it, only reads what is atomic, and is the one writer of `gone`.
 */
#ifndef LIVESHIFT_INTERPOSER_ARENA_BLOCKS_H
#define LIVESHIFT_INTERPOSER_ARENA_BLOCKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* 128 GiB in blocks of 2 MiB; what finds no room here is the driver's. */
#define ARENA_BLOCKS 65536

enum block_state {
    BLOCK_NONE = 0, /* the entry is free */
    BLOCK_LIVE,     /* the application's */
    BLOCK_DROPPED,  /* freed by the application at a moment when the driver can't */
    BLOCK_FREEING,  /* a thread is about to unmap it, or has */
};

struct arena_block {
    _Atomic uint32_t state; /* written last when the block is made */
    _Atomic uint32_t gone;  /* its physical memory was given up; the addresses are still reserved */
    _Atomic uint32_t shared; /* its physical memory was exported, or came from elsewhere */
    _Atomic uint64_t address, size;
    _Atomic int32_t device;
    uint32_t next; /* entry + 1 in the chain, or of the free ones; under the mutex */
};

/* NULL: the table is full. */
struct arena_block *block_enter(uint64_t address, uint64_t size, int32_t device);

/* The live block that begins there; that an address lies in. NULL: none. */
struct arena_block *block_at(uint64_t address);
struct arena_block *block_around(uint64_t address);

/* Changes its state from one to another; false: somebody else was first. It is then found no more. */
bool block_claim(struct arena_block *block, enum block_state from, enum block_state to);
/* A claimed one: it is the application's again; its entry is free. */
void block_put_back(struct arena_block *block);
void block_forget(struct arena_block *block);

/* Entries that have been used, and one of them; any thread may look at any time. */
uint32_t blocks_used(void);
struct arena_block *block_number(uint32_t which);

/* How many blocks are not BLOCK_NONE. */
uint32_t blocks_held(void);

#endif
