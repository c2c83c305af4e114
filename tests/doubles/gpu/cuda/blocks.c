/* SPDX-License-Identifier: Apache-2.0 */
#include "blocks.h"

#include "device.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
/* Sorted by base. */
static struct block *blocks;
static size_t block_count, room;
static unsigned long long last_id;

size_t whole_pages(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

/* Index of the first block that begins above the address. */
static size_t above(uintptr_t address) {
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].base > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct block *block_at(uintptr_t address) {
    size_t next = above(address);
    if (next == 0 || address - blocks[next - 1].base >= blocks[next - 1].size)
        return NULL;
    return &blocks[next - 1];
}

struct block *block_add(struct block block) {
    if (block_count == room) {
        room = room ? 2 * room : 64;
        blocks = realloc(blocks, room * sizeof *blocks);
    }
    size_t at = above(block.base);
    memmove(&blocks[at + 1], &blocks[at], (block_count - at) * sizeof *blocks);
    block.id = ++last_id;
    blocks[at] = block;
    block_count++;
    return &blocks[at];
}

void block_remove(struct block *block) {
    size_t at = (size_t)(block - blocks);
    block_count--;
    memmove(&blocks[at], &blocks[at + 1], (block_count - at) * sizeof *blocks);
}

struct block *blocks_all(size_t *count) {
    *count = block_count;
    return blocks;
}

CUresult block_allocate(enum block_kind kind, CUdevice device, size_t bytes, CUmemoryPool pool,
                        CUdeviceptr *pointer) {
    /* The real one's alignment. */
    size_t charged = (bytes + 511) / 512 * 512;
    if (charged < bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = device_charge(device, charged);
    if (result != CUDA_SUCCESS)
        return result;
    void *base = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        device_release(device, charged);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&blocks_lock);
    block_add((struct block){.base = (uintptr_t)base,
                             .size = bytes,
                             .kind = kind,
                             .device = device,
                             .charged = charged,
                             .pool = pool,
                             .shared = -1});
    pthread_mutex_unlock(&blocks_lock);
    *pointer = (CUdeviceptr)(uintptr_t)base;
    return CUDA_SUCCESS;
}

/* With blocks_lock held. */
static void discard(struct block *block) {
    munmap((void *)block->base, whole_pages(block->size));
    if (block->shared >= 0)
        close(block->shared);
    if (block->charged > 0)
        device_release(block->device, block->charged);
    block_remove(block);
}

CUresult block_free(uintptr_t base, enum block_kind kind, enum block_kind other) {
    pthread_mutex_lock(&blocks_lock);
    struct block *block = block_at(base);
    bool found = block && block->base == base && (block->kind == kind || block->kind == other);
    if (found)
        discard(block);
    pthread_mutex_unlock(&blocks_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void blocks_free_device(CUdevice device) {
    pthread_mutex_lock(&blocks_lock);
    for (size_t i = block_count; i-- > 0;)
        if (blocks[i].device == device && blocks[i].kind <= BLOCK_MANAGED)
            discard(&blocks[i]);
    pthread_mutex_unlock(&blocks_lock);
}
