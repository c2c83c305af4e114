/* SPDX-License-Identifier: Apache-2.0 */
/* Making this process's page and counting into it; the layout and its rules are in page.h. */

#include "counting.h"
#include "page.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

_Static_assert(COLLECTIVE_KINDS <= LIVESHIFT_PAGE_COUNTERS,
               "more kinds than the page has room for");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2,
               "a lock inside the page would not be seen by its reader");

/* Counted into when LIVESHIFT_PAGES is unset or no page could be made: spares hooks a branch. */
static struct liveshift_page unseen;

/* This process's page; NULL until its first collective, and again in a forked child. */
static _Atomic(struct liveshift_page *) current;

/* Held while the page is made, and across fork(), so that no child inherits a half-made one. */
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void before_fork(void) { pthread_mutex_lock(&making); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&making); }

static void after_fork_in_child(void) {
    struct liveshift_page *inherited = atomic_exchange(&current, NULL);
    if (inherited != NULL && inherited != &unseen)
        munmap(inherited, LIVESHIFT_PAGE_SIZE);
    pthread_mutex_unlock(&making);
}

static int32_t number_from_environment(const char *name) {
    const char *text = getenv(name);
    if (text == NULL || *text == '\0')
        return -1;
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    return errno == 0 && *end == '\0' && value >= 0 && value <= INT32_MAX ? (int32_t)value : -1;
}

static void fill(struct liveshift_page *page, pid_t pid) {
    static const char *const kinds[] = {
#define X(kind, symbol, need) "gloo." #kind,
        LIVESHIFT_GLOO_ENTRY_POINTS(X)
#undef X
    };
    memset(page, 0, sizeof *page);
    memcpy(page->magic, LIVESHIFT_PAGE_MAGIC, sizeof page->magic);
    page->layout = LIVESHIFT_PAGE_LAYOUT;
    page->kinds = COLLECTIVE_KINDS;
    page->pid = pid;
    page->rank = number_from_environment("RANK");
    page->world_size = number_from_environment("WORLD_SIZE");
    page->local_rank = number_from_environment("LOCAL_RANK");
    page->created_ns = now_ns();
    snprintf(page->version, sizeof page->version, "%s", LIVESHIFT_VERSION);
    /* Not the kernel's comm: torch renames every main thread to pt_main_thread. */
    snprintf(page->command, sizeof page->command, "%s", program_invocation_short_name);
    for (unsigned i = 0; i < COLLECTIVE_KINDS; i++)
        snprintf(page->counters[i].kind, sizeof page->counters[i].kind, "%s", kinds[i]);
}

/*
 * Puts a fresh page at path and returns it mapped, or NULL with errno set and nothing left behind.
 * Filled by write(), not through the mapping: on a full filesystem that is an error to report,
 * where touching the mapping would be a SIGBUS that kills the rank. Renamed into place, because a
 * page of the same name can only be of a dead process or of the program before an exec.
 */
static struct liveshift_page *put_page(const char *draft, const char *path, pid_t pid) {
    struct liveshift_page first;
    fill(&first, pid);
    unlink(draft);
    int fd = open(draft, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0)
        return NULL;
    void *page = MAP_FAILED;
    ssize_t written = write(fd, &first, sizeof first);
    if (written == (ssize_t)sizeof first)
        page = mmap(NULL, sizeof first, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    else if (written >= 0)
        errno = ENOSPC;
    int failure = errno;
    close(fd); /* an open descriptor would have to be dumped and restored; the mapping suffices */
    if (page == MAP_FAILED) {
        unlink(draft);
        errno = failure;
        return NULL;
    }
    if (rename(draft, path) == 0)
        return page;
    failure = errno;
    munmap(page, sizeof first);
    unlink(draft);
    errno = failure;
    return NULL;
}

static struct liveshift_page *page_in(const char *directory) {
    pid_t pid = getpid();
    char draft[PATH_MAX], path[PATH_MAX];
    struct liveshift_page *page = NULL;
    if (snprintf(path, sizeof path, "%s/%d", directory, pid) >= (int)sizeof path - 1)
        errno = ENAMETOOLONG;
    else {
        snprintf(draft, sizeof draft, "%s/.%d", directory, pid);
        page = put_page(draft, path, pid);
    }
    if (page != NULL)
        return page;
    /* Counting is no reason to stop a training job; but nobody should wonder where its rate is. */
    dprintf(STDERR_FILENO,
            "liveshift: cannot make the page %d in LIVESHIFT_PAGES=%s: %s; "
            "collectives of this process are not counted\n",
            pid, directory, strerror(errno));
    return &unseen;
}

static struct liveshift_page *first_page(void) {
    static int fork_handled; /* under `making`; handlers are inherited, so once per exec */
    pthread_mutex_lock(&making);
    struct liveshift_page *page = atomic_load_explicit(&current, memory_order_relaxed);
    if (page == NULL) {
        const char *directory = getenv("LIVESHIFT_PAGES");
        if (!fork_handled)
            fork_handled =
                pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
        page = directory != NULL && *directory != '\0' ? page_in(directory) : &unseen;
        atomic_store_explicit(&current, page, memory_order_release);
    }
    pthread_mutex_unlock(&making);
    return page;
}

struct call call_started(enum collective_kind kind) {
    struct liveshift_page *page = atomic_load_explicit(&current, memory_order_acquire);
    if (__builtin_expect(page == NULL, 0))
        page = first_page();
    atomic_store_explicit(&page->last_started_ns, now_ns(), memory_order_relaxed);
    atomic_fetch_add_explicit(&page->counters[kind].started, 1, memory_order_relaxed);
    return (struct call){page, kind};
}

void call_finished(const struct call *call) {
    struct liveshift_page *page = call->page;
    atomic_store_explicit(&page->last_finished_ns, now_ns(), memory_order_relaxed);
    atomic_fetch_add_explicit(&page->counters[call->kind].finished, 1, memory_order_relaxed);
}
