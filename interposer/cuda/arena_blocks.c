/* SPDX-License-Identifier: Apache-2.0 */
#include "arena_blocks.h"

#include "gate/process.h"

#include <pthread.h>
#include <string.h>

#define CHAINS 4096

static struct arena_block blocks[ARENA_BLOCKS]; /* takes memory only for entries that were used */
static _Atomic uint32_t used, in_use;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint32_t chains[CHAINS]; /* entry + 1 */
static uint32_t unused;         /* entry + 1 */

/* Gives a forked child an empty table, since CUDA does not work in it. The child has neither its
   parent's memory nor the thread that perhaps held the mutex. Each way into the table calls this
   first. */
static void reset_if_forked(void) {
    static _Atomic unsigned generation;
    unsigned before = atomic_load_explicit(&generation, memory_order_relaxed);
    if (before == process_generation() ||
        !atomic_compare_exchange_strong(&generation, &before, process_generation()))
        return;
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    memset(blocks, 0, atomic_load(&used) * sizeof *blocks);
    memset(chains, 0, sizeof chains);
    unused = 0;
    atomic_store(&used, 0);
    atomic_store(&in_use, 0);
}

/* Reserved addresses are aligned to 2 MiB at least. */
static uint32_t *chain_of(uint64_t address) {
    return &chains[((address >> 21) * 0x9e3779b97f4a7c15u) >> 52 & (CHAINS - 1)];
}

static uint32_t entry_of(const struct arena_block *block) { return (uint32_t)(block - blocks); }

static void chain_insert(struct arena_block *block) {
    uint32_t *chain = chain_of(atomic_load(&block->address));
    block->next = *chain;
    *chain = entry_of(block) + 1;
}

static void chain_remove(struct arena_block *block) {
    uint32_t *link = chain_of(atomic_load(&block->address));
    while (*link != 0 && *link != entry_of(block) + 1)
        link = &blocks[*link - 1].next;
    if (*link != 0)
        *link = block->next;
}

struct arena_block *block_add(uint64_t address, uint64_t size, int32_t device) {
    struct arena_block *block = NULL;
    reset_if_forked();
    pthread_mutex_lock(&mutex);
    uint32_t so_far = atomic_load(&used);
    if (unused != 0) {
        block = &blocks[unused - 1];
        unused = block->next;
    } else if (so_far < ARENA_BLOCKS)
        block = &blocks[so_far];
    if (block != NULL) {
        atomic_store(&block->address, address);
        atomic_store(&block->size, size);
        atomic_store(&block->device, device);
        atomic_store(&block->released, 0);
        atomic_store(&block->shared, 0);
        atomic_store(&block->state, BLOCK_LIVE);
        chain_insert(block);
        if (entry_of(block) == so_far)
            atomic_store(&used, so_far + 1);
        atomic_fetch_add(&in_use, 1);
    }
    pthread_mutex_unlock(&mutex);
    return block;
}

struct arena_block *block_at(uint64_t address) {
    if (blocks_in_use() == 0)
        return NULL;
    pthread_mutex_lock(&mutex);
    uint32_t at = *chain_of(address);
    while (at != 0 && atomic_load(&blocks[at - 1].address) != address)
        at = blocks[at - 1].next;
    pthread_mutex_unlock(&mutex);
    return at != 0 ? &blocks[at - 1] : NULL;
}

struct arena_block *block_containing(uint64_t address) {
    for (uint32_t i = 0; i < blocks_used(); i++) {
        uint64_t from = atomic_load(&blocks[i].address);
        if (atomic_load(&blocks[i].state) == BLOCK_LIVE && address >= from &&
            address - from < atomic_load(&blocks[i].size))
            return &blocks[i];
    }
    return NULL;
}

bool block_claim(struct arena_block *block, enum block_state from, enum block_state to) {
    pthread_mutex_lock(&mutex);
    bool claimed = atomic_load(&block->state) == from;
    if (claimed) {
        if (from == BLOCK_LIVE)
            chain_remove(block);
        atomic_store(&block->state, to);
    }
    pthread_mutex_unlock(&mutex);
    return claimed;
}

void block_restore(struct arena_block *block) {
    pthread_mutex_lock(&mutex);
    chain_insert(block);
    atomic_store(&block->state, BLOCK_LIVE);
    pthread_mutex_unlock(&mutex);
}

void block_remove(struct arena_block *block) {
    pthread_mutex_lock(&mutex);
    atomic_store(&block->state, BLOCK_NONE);
    block->next = unused;
    unused = entry_of(block) + 1;
    atomic_fetch_sub(&in_use, 1);
    pthread_mutex_unlock(&mutex);
}

uint32_t blocks_used(void) {
    reset_if_forked();
    return atomic_load(&used);
}

struct arena_block *block_by_index(uint32_t which) { return &blocks[which]; }

uint32_t blocks_in_use(void) {
    reset_if_forked();
    return atomic_load_explicit(&in_use, memory_order_relaxed);
}
