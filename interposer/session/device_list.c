/* SPDX-License-Identifier: Apache-2.0 */
/* The list of device memory: the ledger's rows have the driver's memory, and the arena's own table
   has the arena's. The reader of neither takes a lock. */
#include "device_serve.h"

#include "cuda/arena_blocks.h"
#include "cuda/device_calls.h"
#include "device_memory.h"
#include "ledger/ledger_rows.h"

#include <string.h>

static bool is_the_drivers(const struct ledger_record *row) {
    return (row->kind == LIVESHIFT_MEMORY_DEVICE || row->kind == LIVESHIFT_MEMORY_POOL ||
            row->kind == LIVESHIFT_MEMORY_MAPPED) &&
           row->device >= 0 && row->size > 0;
}

/* Whether the driver still has the row's memory. A thread may have been stopped after the driver
   freed the memory and before the row was freed, or have freed it in a way that the ledger doesn't
   see. Then the addresses may belong to something else by now. */
static bool is_known(const struct ledger_record *row) {
    unsigned long long base;
    size_t length;
    if (row->kind == LIVESHIFT_MEMORY_MAPPED)
        return memory_is_mapped(row->address) == CUDA_OK;
    return DEVICE_CALL(cuMemGetAddressRange_v2, &base, &length, row->address) == CUDA_OK &&
           base == row->address && length >= row->size;
}

static bool next_row(struct device_cursor *cursor, struct liveshift_device_reply *reply) {
    struct ledger_record row;
    while (row_read(cursor->row, &row)) {
        cursor->row++;
        if (!is_the_drivers(&row) || !is_known(&row))
            continue;
        reply->address = row.address;
        reply->size = row.size;
        reply->device = row.device;
        reply->kind = row.kind;
        reply->value = 1;
        return true;
    }
    return false;
}

/* Whether the block has memory or waits for it. If a thread is freeing the block, it may have
   unmapped the memory already. */
static bool is_there(struct arena_block *block) {
    uint32_t state = atomic_load(&block->state);
    return state != BLOCK_NONE && (state != BLOCK_FREEING || atomic_load(&block->released) != 0 ||
                                   memory_is_mapped(atomic_load(&block->address)) == CUDA_OK);
}

static bool next_block(struct device_cursor *cursor, struct liveshift_device_reply *reply) {
    while (cursor->block < blocks_used()) {
        struct arena_block *block = block_by_index(cursor->block++);
        if (!is_there(block))
            continue;
        reply->address = atomic_load(&block->address);
        reply->size = atomic_load(&block->size);
        reply->device = atomic_load(&block->device);
        reply->kind = LIVESHIFT_MEMORY_ARENA;
        reply->value = atomic_load(&block->released) == 0;
        return true;
    }
    return false;
}

bool device_list(struct device_cursor *cursor, uint64_t number,
                 struct liveshift_device_reply *reply) {
    if (number < cursor->next)
        memset(cursor, 0, sizeof *cursor);
    for (;; cursor->next++) {
        if (!next_row(cursor, reply) && !next_block(cursor, reply))
            return false;
        if (cursor->next == number)
            break;
    }
    cursor->next++;
    /* The second form gives the uuid of a part of a GPU (MIG); drivers before 11.4 lack it. */
    if (DEVICE_CALL(cuDeviceGetUuid_v2, reply->uuid, reply->device) != CUDA_OK)
        DEVICE_CALL(cuDeviceGetUuid, reply->uuid, reply->device);
    return true;
}
