/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena's blocks: a table in this process's own memory. The application's threads add, find and
 * remove blocks under a mutex, which they never hold across a call. The service thread may run
 * while the holder of the mutex is stopped, so it takes no mutex: it reads only atomic fields, and
 * it is the only writer of `released`.
 */
#ifndef LIVESHIFT_INTERPOSER_ARENA_BLOCKS_H
#define LIVESHIFT_INTERPOSER_ARENA_BLOCKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Entries of the table: 128 GiB in blocks of 2 MiB. If it is full, the driver allocates instead. */
#define ARENA_BLOCKS 65536

enum block_state {
    BLOCK_NONE = 0,      /* the entry is free */
    BLOCK_LIVE,          /* the application uses it */
    BLOCK_FREE_DEFERRED, /* the application freed it at a moment when the driver can't free it */
    BLOCK_FREEING,       /* a thread is about to unmap it, or has unmapped it */
};

struct arena_block {
    _Atomic uint32_t state; /* written last when the block is made */
    _Atomic uint32_t
        released; /* its physical memory was given up; the addresses are still reserved */
    _Atomic uint32_t shared; /* its physical memory was exported, or came from elsewhere */
    _Atomic uint64_t address, size;
    _Atomic int32_t device;
    uint32_t next; /* next entry + 1 of its chain, or of the free list; under the mutex */
};

/* Enters a new live block. NULL: the table is full. */
struct arena_block *block_add(uint64_t address, uint64_t size, int32_t device);

/* The live block that begins at the address, or in which the address lies. NULL: none. */
struct arena_block *block_at(uint64_t address);
struct arena_block *block_containing(uint64_t address);

/* Changes a block's state; false: another thread has changed it first. block_at and
   block_containing do not find a claimed block. */
bool block_claim(struct arena_block *block, enum block_state from, enum block_state to);
/* For a claimed block: block_restore returns it to the application, block_remove frees it. */
void block_restore(struct arena_block *block);
void block_remove(struct arena_block *block);

/* How many entries have been used, and the entry of a number. Any thread may call these any
   time. */
uint32_t blocks_used(void);
struct arena_block *block_by_index(uint32_t which);

/* How many blocks are not BLOCK_NONE. */
uint32_t blocks_in_use(void);

#endif
