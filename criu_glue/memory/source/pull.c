// SPDX-License-Identifier: Apache-2.0

#include "pull.h"
#include "digest.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_PAGES = CHUNK_PAYLOAD / PAGE };

// Documentation/admin-guide/mm/pagemap.rst
#define ENTRY_PRESENT (UINT64_C(1) << 63)
#define ENTRY_EXCLUSIVE (UINT64_C(1) << 56)

// Some pages of the process, and where their content goes.
struct batch {
    size_t count, pages;
    struct iovec part[MOST_PAGES];
    bool is_read[MOST_PAGES];
    uint8_t *at; // the content of the pages, in order
};

struct pull *pull_new(pid_t pid, int memory, int pagemap, uint32_t inner, uint32_t incarnation,
                      uint32_t round, uint32_t pass, const struct regions *regions,
                      struct sent *sent) {
    struct pull *pull = calloc(1, sizeof *pull);
    if (pull == NULL)
        return NULL;
    *pull = (struct pull){
        .pid = pid,
        .memory = memory,
        .pagemap = pagemap,
        .inner = inner,
        .incarnation = incarnation,
        .round = round,
        .pass = pass,
        .regions = regions,
        .sent = sent,
        .lock = PTHREAD_MUTEX_INITIALIZER,
    };
    return pull;
}

void pull_refer_to(struct pull *pull, const struct sent *parent, uint32_t parent_pid) {
    pull->parent = parent;
    pull->parent_pid = parent_pid;
}

void pull_free(struct pull *pull) {
    pthread_mutex_destroy(&pull->lock);
    free(pull);
}

struct pull_state pull_state(struct pull *pull) {
    pthread_mutex_lock(&pull->lock);
    struct pull_state state = pull->state;
    pthread_mutex_unlock(&pull->lock);
    return state;
}

// Takes the next pages into the batch, at most most of them.
static void next_batch(struct pull *pull, struct batch *batch, size_t most) {
    batch->count = batch->pages = 0;
    pthread_mutex_lock(&pull->lock);
    while (batch->pages < most && pull->state.error == 0 && pull->next < pull->regions->count) {
        const struct region *region = &pull->regions->at[pull->next];
        uint64_t start = region->start + pull->offset;
        size_t pages = (region->end - start) / PAGE;
        if (pages > most - batch->pages) {
            pages = most - batch->pages;
            pull->offset += pages * PAGE;
        } else {
            pull->next++;
            pull->offset = 0;
        }
        batch->part[batch->count++] = (struct iovec){(void *)start, pages * PAGE};
        batch->pages += pages;
    }
    pthread_mutex_unlock(&pull->lock);
}

// Reads by /proc/PID/mem, which also reads pages that the process itself may not read. Pages that
// cannot be read are left out.
static void read_by_file(const struct pull *pull, struct batch *batch, size_t done) {
    size_t page = 0;
    for (size_t i = 0; i < batch->count; i++) {
        uint64_t address = (uintptr_t)batch->part[i].iov_base;
        size_t pages = batch->part[i].iov_len / PAGE;
        for (size_t k = done > page ? done - page : 0; k < pages;) {
            ssize_t got = pread(pull->memory, batch->at + (page + k) * PAGE, (pages - k) * PAGE,
                                (off_t)(address + k * PAGE));
            size_t whole = got > 0 ? (size_t)got / PAGE : 0;
            memset(batch->is_read + page + k, true, whole);
            k += whole ? whole : 1;
        }
        page += pages;
    }
}

// Whether the process shares one of the pages with another one (fork(2)).
static bool is_shared(const struct pull *pull, const struct batch *batch) {
    uint64_t entry[MOST_PAGES];
    for (size_t i = 0; pull->pagemap >= 0 && i < batch->count; i++) {
        size_t pages = batch->part[i].iov_len / PAGE;
        off_t at = (off_t)((uintptr_t)batch->part[i].iov_base / PAGE * sizeof *entry);
        ssize_t got = pread(pull->pagemap, entry, pages * sizeof *entry, at);
        for (ssize_t k = 0; k < got / (ssize_t)sizeof *entry; k++)
            if ((entry[k] & (ENTRY_PRESENT | ENTRY_EXCLUSIVE)) == ENTRY_PRESENT)
                return true;
    }
    return false;
}

// Reads the pages of the batch. Returns 0, or -ESRCH when the process has ended.
static int read_batch(const struct pull *pull, struct batch *batch) {
    struct iovec here = {batch->at, batch->pages * PAGE};
    memset(batch->is_read, false, batch->pages);
    // process_vm_readv is more than twice as fast as /proc/PID/mem, but it pins the pages. Before
    // the kernel pins a shared page, it gives the process a copy of its own (gup_must_unshare).
    size_t done = 0;
    if (!is_shared(pull, batch)) {
        ssize_t got = process_vm_readv(pull->pid, &here, 1, batch->part, batch->count, 0);
        if (got < 0 && errno == ESRCH)
            return -ESRCH;
        done = got > 0 ? (size_t)got / PAGE : 0;
        memset(batch->is_read, true, done);
    }
    if (done < batch->pages)
        read_by_file(pull, batch, done);
    return 0;
}

static bool same(struct sent_hash a, struct sent_hash b) {
    return a.low == b.low && a.high == b.high;
}

// Returns the hash of a page. It is never 0 in both halves, since that means: nothing was sent.
static struct sent_hash hash_of(const uint8_t *page) {
    struct page_hash hash = page_hash(page);
    return (struct sent_hash){hash.low, hash.high};
}

// Whether the parent's page at the address is equal and was sent before this pass.
static bool parent_has(const struct pull *pull, uint64_t address, struct sent_hash hash) {
    if (pull->parent == NULL)
        return false;
    const struct sent_block *block = sent_find(pull->parent, address);
    size_t index = sent_index(address);
    return block != NULL && same(block->hash[index], hash) && block->pass[index] < pull->pass;
}

static void add_run(struct run *run, size_t *runs, uint64_t address, uint32_t kind) {
    struct run *last = *runs ? &run[*runs - 1] : NULL;
    if (last != NULL && last->kind == kind &&
        last->address + (uint64_t)last->pages * PAGE == address)
        last->pages++;
    else
        run[(*runs)++] = (struct run){.address = address, .pages = 1, .kind = kind};
}

static void add_reference(struct pull_chunk *chunk, uint64_t address, struct sent_hash hash,
                          uint32_t parent_pid) {
    uint8_t *at = chunk->reference + chunk->references++ * REFERENCE;
    struct reference to = {{hash.low, hash.high}, parent_pid, address};
    chunk_put_reference(at, to);
    add_run(chunk->reference_run, &chunk->reference_runs, address, RUN_REFERENCE);
}

// Puts one page that was read into the chunk, in the shortest form. Leaves out a page that the
// destination has.
static void add_page(const struct pull *pull, struct pull_chunk *chunk, uint64_t address,
                     const uint8_t *page) {
    struct sent_block *block = sent_find(pull->sent, address);
    size_t index = sent_index(address);
    struct sent_hash hash = hash_of(page);
    sent_make_current(block, index);
    if (same(block->hash[index], hash))
        return;
    sent_record(block, index, hash, pull->pass);
    if (page_is_zero(page)) {
        add_run(chunk->run, &chunk->runs, address, RUN_ZERO);
    } else if (parent_has(pull, address, hash)) {
        add_reference(chunk, address, hash, pull->parent_pid);
    } else {
        uint8_t *to = chunk->at + PAGE + chunk->pages++ * PAGE;
        if (to != page) // pages before this one have no payload
            memmove(to, page, PAGE);
        add_run(chunk->run, &chunk->runs, address, RUN_DATA);
    }
}

static void add_batch(struct pull *pull, struct pull_chunk *chunk, const struct batch *batch) {
    struct pull_state seen = {0};
    const uint8_t *page = batch->at;
    const bool *is_read = batch->is_read;
    for (size_t i = 0; i < batch->count; i++) {
        uint64_t address = (uintptr_t)batch->part[i].iov_base, end;
        end = address + batch->part[i].iov_len;
        for (; address < end; address += PAGE, page += PAGE, is_read++) {
            if (*is_read)
                add_page(pull, chunk, address, page);
            else if (seen.unreadable++ == 0)
                seen.first_unreadable = address;
        }
    }
    pthread_mutex_lock(&pull->lock);
    if (seen.unreadable && pull->state.unreadable == 0)
        pull->state.first_unreadable = seen.first_unreadable;
    pull->state.unreadable += seen.unreadable;
    pthread_mutex_unlock(&pull->lock);
}

// Returns how many more pages fit into the chunk, whichever form each of them takes.
static size_t space(const struct pull_chunk *chunk) {
    size_t used = chunk->pages * PAGE + chunk->references * REFERENCE;
    size_t pages = (CHUNK_PAYLOAD - used) / PAGE;
    size_t runs = CHUNK_RUNS - chunk->runs - chunk->reference_runs;
    size_t references = PULL_MOST_REFERENCES - chunk->references;
    pages = pages < runs ? pages : runs;
    return pages < references ? pages : references;
}

int pull_fill(struct pull *pull, struct pull_chunk *chunk, uint64_t budget, uint64_t *read) {
    struct batch batch;
    for (*read = 0; *read < budget; *read += batch.pages * PAGE) {
        size_t most = space(chunk);
        if (most == 0)
            return PULL_FULL;
        next_batch(pull, &batch, most);
        if (batch.pages == 0)
            return PULL_DONE;
        batch.at = chunk->at + PAGE + chunk->pages * PAGE;
        int rc = read_batch(pull, &batch);
        if (rc != 0) {
            pthread_mutex_lock(&pull->lock);
            pull->state.error = rc;
            pthread_mutex_unlock(&pull->lock);
            return PULL_DONE;
        }
        add_batch(pull, chunk, &batch);
    }
    return PULL_PAUSE;
}
