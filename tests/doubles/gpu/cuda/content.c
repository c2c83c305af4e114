/* SPDX-License-Identifier: Apache-2.0 */
#include "content.h"

#include "blocks.h"
#include "handles.h"

#include <string.h>
#include <sys/mman.h>

#define PAGE 4096

/* Pages of zeros stay untouched, so that 16 "GiB" that nobody wrote cost nothing. */
static void copy_pages(char *to, const char *from, size_t bytes) {
    static const char zeros[PAGE];
    for (size_t i = 0; i < bytes; i += PAGE)
        if (memcmp(from + i, zeros, PAGE) != 0)
            memcpy(to + i, from + i, PAGE);
}

void *pages_saved(const void *base, size_t bytes) {
    void *saved = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (saved == MAP_FAILED)
        return NULL;
    copy_pages(saved, base, whole_pages(bytes));
    return saved;
}

void pages_bring_back(void *base, void *saved, size_t bytes) {
    copy_pages(base, saved, whole_pages(bytes));
    munmap(saved, whole_pages(bytes));
}

static bool is_private(const struct block *block) {
    return block->kind == BLOCK_DEVICE || block->kind == BLOCK_POOL;
}

enum obstacle content_obstacle(void) {
    size_t count;
    enum obstacle found = OBSTACLE_NONE;
    pthread_mutex_lock(&blocks_lock);
    const struct block *all = blocks_all(&count);
    for (size_t i = 0; i < count && found != OBSTACLE_MANAGED; i++) {
        if (all[i].kind == BLOCK_MANAGED)
            found = OBSTACLE_MANAGED;
        else if (all[i].kind == BLOCK_IPC || all[i].shared >= 0)
            found = OBSTACLE_IPC;
    }
    if (found == OBSTACLE_NONE && handles_shared())
        found = OBSTACLE_IPC;
    pthread_mutex_unlock(&blocks_lock);
    return found;
}

bool content_save(void) {
    size_t count;
    pthread_mutex_lock(&blocks_lock);
    struct block *all = blocks_all(&count);
    bool saved = handles_save();
    for (size_t i = 0; i < count && saved; i++) {
        void *base = (void *)all[i].base;
        if (all[i].kind == BLOCK_MAPPED) {
            mprotect(base, all[i].size, PROT_NONE);
        } else if (is_private(&all[i])) {
            all[i].saved = pages_saved(base, all[i].size);
            saved = all[i].saved != NULL;
            madvise(base, whole_pages(all[i].size), MADV_DONTNEED);
            mprotect(base, whole_pages(all[i].size), PROT_NONE);
        }
    }
    pthread_mutex_unlock(&blocks_lock);
    return saved;
}

void content_bring_back(void) {
    size_t count;
    pthread_mutex_lock(&blocks_lock);
    struct block *all = blocks_all(&count);
    handles_bring_back();
    for (size_t i = 0; i < count; i++) {
        void *base = (void *)all[i].base;
        if (all[i].kind == BLOCK_MAPPED) {
            mprotect(base, all[i].size, protection(all[i].access));
        } else if (is_private(&all[i])) {
            mprotect(base, whole_pages(all[i].size), PROT_READ | PROT_WRITE);
            pages_bring_back(base, all[i].saved, all[i].size);
            all[i].saved = NULL;
        }
    }
    pthread_mutex_unlock(&blocks_lock);
}
