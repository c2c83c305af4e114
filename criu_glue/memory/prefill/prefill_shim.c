// SPDX-License-Identifier: Apache-2.0
//
// This library is preloaded into an early CRIU, which starts while the job runs at its source.
// Before CRIU's main begins, the library obeys the agent's orders (prefill.h): it maps memory in
// huge pages and copies pages of the job into it. After the order PREFILL_RESTORE CRIU restores.
// CRIU forks the tasks, so they have these pages at no cost. Where CRIU maps a task's memory (criu:
// mem.c, premap_private_vma), the library moves the pages to that place. It moves page tables and
// copies nothing.
//
// LIVESHIFT_PREFILL is "<socket>:<the pages' file>:<the plan's memory>", all descriptors. If the
// agent ends before PREFILL_RESTORE, this CRIU ends, too. Memory that does not fit the plan is
// mapped as CRIU wants it, without the pages, and the plan then does not say that it was placed.

#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS // mmap and mmap64 are both defined here
#include "page.h"
#include "prefill.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { NICE = 5, MESSAGE = 128 << 10, TRIED_BASES = 64 };

#define ANONYMOUS (MAP_PRIVATE | MAP_ANONYMOUS)
#define BASE UINT64_C(0x100000000000)
#define BASES_APART UINT64_C(0x10000000000)

static struct {
    int socket, pages, plan_fd;
    bool restoring;
    struct plan *plan;
} early;

union message {
    struct prefill_order order;
    uint8_t raw[MESSAGE];
};

static int64_t negative_errno(void) { return -(int64_t)errno; }

static void *at(uint64_t address) { return (void *)(uintptr_t)address; }

static int64_t map_fixed(uint64_t start, uint64_t end) {
    void *got = mmap(at(start), end - start, PROT_READ | PROT_WRITE, ANONYMOUS | MAP_FIXED, -1, 0);
    return got == MAP_FAILED ? negative_errno() : 0;
}

static int64_t reserve_area(const struct prefill_order *o, int64_t *shift) {
    uint64_t size = o->high - o->low;
    void *got = mmap(NULL, size + BLOCK, PROT_NONE, ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED)
        return negative_errno();
    uint64_t low = ((uintptr_t)got + BLOCK - 1) / BLOCK * BLOCK + o->low % BLOCK;
    *shift = (int64_t)(low - o->low);
    return map_fixed(o->start + (uint64_t)*shift, o->end + (uint64_t)*shift);
}

// The kernel must not make huge pages here by itself, also where the host is set to make them
// everywhere: only the agent's orders do. Freed pages leave holes. khugepaged would fill the holes
// with zeros (max_ptes_none), and the fill would take these for pages in place (UFFDIO_COPY:
// EEXIST). A task inherits the setting. It has its own one again when CRIU has registered its
// memory (criu: pie/restorer.c).
static void huge_pages(bool by_kernel) { prctl(PR_SET_THP_DISABLE, !by_kernel, 0, 0, 0); }

// Copies one block into a huge page of its own. Without a huge page it fails: a prefill in small
// pages saves no time.
static int64_t copy_block(const struct prefill_order *o, const uint32_t *slot) {
    uint8_t *to = at(o->start + (uint64_t)o->shift);
    if (o->end) { // the first copy of this block
        *(volatile uint8_t *)to = 0;
        huge_pages(true); // MADV_COLLAPSE works only with this
        int64_t rc = madvise(to, BLOCK, MADV_COLLAPSE) == 0 ? 0 : negative_errno();
        huge_pages(false);
        if (rc != 0) {
            madvise(to, BLOCK, MADV_DONTNEED);
            return rc;
        }
    }
    for (uint32_t i = 0, run; i < BLOCK_PAGES; i += run) {
        for (run = 1; slot[i] >= FIRST_SLOT && i + run < BLOCK_PAGES; run++)
            if (slot[i + run] != slot[i] + run)
                break;
        if (slot[i] == PAGE_ZERO && !o->end)
            memset(to + i * PAGE, 0, PAGE);
        if (slot[i] < FIRST_SLOT)
            continue;
        // The file is read, not mapped: to unmap it would cost time when CRIU must begin.
        off_t from = (off_t)(slot[i] - FIRST_SLOT) * PAGE;
        if (pread(early.pages, to + i * PAGE, (size_t)run * PAGE, from) != (ssize_t)(run * PAGE))
            return -EIO;
    }
    return 0;
}

static int64_t write_back(const struct prefill_order *o, const uint32_t *slot) {
    uint8_t *from = at(o->start + (uint64_t)o->shift);
    for (uint32_t i = 0; i < BLOCK_PAGES; i++)
        if (slot[i] >= FIRST_SLOT && pwrite(early.pages, from + i * PAGE, PAGE,
                                            (off_t)(slot[i] - FIRST_SLOT) * PAGE) != PAGE)
            return -EIO;
    // Pages are freed only after all are written: after an error the order may come again.
    for (uint32_t i = 0; i < BLOCK_PAGES; i++)
        if (slot[i] >= FIRST_SLOT)
            madvise(from + i * PAGE, PAGE, MADV_DONTNEED);
    return 0;
}

static int64_t discard(const struct prefill_order *o, const struct prefill_discard *range) {
    for (uint32_t i = 0; i < o->count; i++)
        if (madvise(at(range[i].address + (uint64_t)o->shift), range[i].pages * PAGE,
                    MADV_DONTNEED) != 0)
            return negative_errno();
    return 0;
}

static int64_t begin_restore(void) {
    struct stat about;
    if (fstat(early.plan_fd, &about) != 0)
        return negative_errno();
    struct plan *plan =
        mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, early.plan_fd, 0);
    if (plan == MAP_FAILED)
        return negative_errno();
    if (plan->magic != PLAN_MAGIC)
        return -EINVAL;
    early.plan = plan;
    return 0;
}

static int64_t handle_order(const union message *m, size_t length, int64_t *shift) {
    const struct prefill_order *o = &m->order;
    size_t rest = length - sizeof *o;
    switch (o->op) {
    case PREFILL_MAP:
        return reserve_area(o, shift);
    case PREFILL_GROW:
        return map_fixed(o->start + (uint64_t)o->shift, o->end + (uint64_t)o->shift);
    case PREFILL_COPY:
        return rest == BLOCK_PAGES * sizeof(uint32_t) ? copy_block(o, (const uint32_t *)(o + 1))
                                                      : -EINVAL;
    case PREFILL_WRITE_BACK:
        return rest == BLOCK_PAGES * sizeof(uint32_t) ? write_back(o, (const uint32_t *)(o + 1))
                                                      : -EINVAL;
    case PREFILL_DISCARD:
        return rest == o->count * sizeof(struct prefill_discard)
                   ? discard(o, (const struct prefill_discard *)(o + 1))
                   : -EINVAL;
    case PREFILL_RESTORE:
        return begin_restore();
    }
    return -EINVAL;
}

// Handles orders until PREFILL_RESTORE, and then sets early.restoring. If the agent ends before
// that, it returns without setting it.
static void *serve(void *unused) {
    static union message m;
    // Only this thread is nice: the job's processes must descend from one that never was.
    setpriority(PRIO_PROCESS, (id_t)gettid(), NICE);
    while (early.plan == NULL) {
        ssize_t n = recv(early.socket, &m, sizeof m, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < (ssize_t)sizeof m.order)
            return unused;
        struct prefill_answer answer = {0, 0};
        answer.error = handle_order(&m, (size_t)n, &answer.shift);
        if (send(early.socket, &answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer)
            return unused;
    }
    early.restoring = true;
    return unused;
}

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("LIVESHIFT_PREFILL");
    if (text == NULL || sscanf(text, "%d:%d:%d", &early.socket, &early.pages, &early.plan_fd) != 3)
        return;
    unsetenv("LIVESHIFT_PREFILL"); // CRIU's hook inherits the environment and must not do this
    huge_pages(false);
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&thread, NULL, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0 || pthread_join(thread, NULL) != 0 || !early.restoring)
        _exit(1);
    close(early.pages);
    close(early.plan_fd);
    close(early.socket);
}

// The state in one task: how many of its mappings CRIU has made.
static struct {
    pid_t pid;
    struct plan_process *process;
    struct plan_vma *next, *end;
    uint64_t expected; // the address of CRIU's next mapping
} task;

typedef void *(*mmap_call)(void *, size_t, int, int, int, off_t);
typedef void *(*mremap_call)(void *, size_t, size_t, int, void *);

static mmap_call real_mmap(void) {
    static mmap_call real;
    if (real == NULL)
        real = (mmap_call)dlsym(RTLD_NEXT, "mmap64");
    return real;
}

static mremap_call real_mremap(void) {
    static mremap_call real;
    if (real == NULL)
        real = (mremap_call)dlsym(RTLD_NEXT, "mremap");
    return real;
}

static void find_task(void) {
    pid_t pid = getpid();
    if (pid == task.pid)
        return;
    memset(&task, 0, sizeof task);
    task.pid = pid;
    struct plan_process *process = plan_processes(early.plan);
    for (uint32_t i = 0; i < early.plan->processes; i++)
        if (process[i].pid == (uint32_t)pid)
            task.process = &process[i];
}

// Reserves the place for all private mappings (criu: prepare_mappings). The kernel can move whole
// page tables only where source, place and final address have the same offset within a block.
static void *reserve(size_t size) {
    struct plan_vma *first = plan_vmas(early.plan) + task.process->first;
    if (size != task.process->total)
        return MAP_FAILED; // it is another mapping, or does not fit the plan: nothing is placed
    for (uint64_t i = 0; i < TRIED_BASES; i++) {
        void *want = at(BASE + i * BASES_APART + task.process->base_rest);
        if (real_mmap()(want, size, PROT_NONE, ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != want)
            continue;      // another mapping is there
        huge_pages(false); // CRIU may have changed the setting in a test (criu: kerndat.c)
        task.next = first;
        task.end = first + task.process->count;
        task.expected = (uintptr_t)want;
        return want;
    }
    return MAP_FAILED;
}

static struct plan_vma *expected(const void *address, size_t size) {
    if (task.next == task.end || (uintptr_t)address != task.expected)
        return NULL;
    if (task.next->size != size) { // CRIU does not map what was planned: nothing more is placed
        task.next = task.end = NULL;
        task.process = NULL;
        return NULL;
    }
    task.expected += size;
    return task.next++;
}

static bool placed_for_another(const struct plan_vma *vma) {
    const struct plan_vma *all = plan_vmas(early.plan);
    for (uint32_t i = 0; i < early.plan->vmas; i++)
        if (all[i].start == vma->start && all[i].placed)
            return true;
    return false;
}

#define EXPORT __attribute__((visibility("default")))

EXPORT void *mmap64(void *address, size_t size, int prot, int flags, int fd, off_t offset) {
    if (early.plan == NULL)
        return real_mmap()(address, size, prot, flags, fd, offset);
    find_task();
    if (task.process == NULL)
        return real_mmap()(address, size, prot, flags, fd, offset);
    if (task.end == NULL && address == NULL && prot == PROT_NONE && flags == ANONYMOUS) {
        void *got = reserve(size);
        if (got != MAP_FAILED)
            return got;
    }
    struct plan_vma *vma = flags & MAP_FIXED ? expected(address, size) : NULL;
    if (vma != NULL && vma->source && flags == (ANONYMOUS | MAP_FIXED) && fd == -1 &&
        !(prot & PROT_EXEC)) {
        void *got =
            real_mremap()(at(vma->source), size, size, MREMAP_MAYMOVE | MREMAP_FIXED, address);
        if (got == address) {
            if ((prot | PROT_WRITE) != (PROT_READ | PROT_WRITE))
                mprotect(address, size, prot);
            vma->placed = 1;
            return got;
        }
    }
    return real_mmap()(address, size, prot, flags, fd, offset);
}

EXPORT void *mmap(void *address, size_t size, int prot, int flags, int fd, off_t offset) {
    return mmap64(address, size, prot, flags, fd, offset);
}

// CRIU takes mappings that a task may share with its parent over from the parent. Pages that were
// placed in them for the parent do not belong to this task, so they are freed.
EXPORT void *mremap(void *old, size_t old_size, size_t size, int flags, ...) {
    va_list list;
    va_start(list, flags);
    void *address = flags & MREMAP_FIXED ? va_arg(list, void *) : NULL;
    va_end(list);
    void *got = real_mremap()(old, old_size, size, flags, address);
    if (early.plan == NULL || got == MAP_FAILED || (uintptr_t)old < BASE ||
        (uintptr_t)old >= BASE + TRIED_BASES * BASES_APART)
        return got;
    find_task();
    struct plan_vma *vma = task.process != NULL ? expected(address, size) : NULL;
    if (vma == NULL || placed_for_another(vma))
        madvise(got, size, MADV_DONTNEED);
    return got;
}
