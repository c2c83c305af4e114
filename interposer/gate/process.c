/* SPDX-License-Identifier: Apache-2.0 */
/* Makes this process's page at its first collective, communicator or allocation. page.h says what
   the page is, and what happens to it at fork and exec. */

#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(KINDS <= LIVESHIFT_PAGE_COUNTERS, "more kinds than the page has room for");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2,
               "a lock inside the page would not be seen by its reader");

_Atomic(struct gate *) process_gate;
__thread int32_t process_own_tid __attribute__((tls_model("initial-exec")));

static struct gate the_gate;
static _Atomic unsigned generation;

/* Held while the page is made or grown, and across fork(), so that a child never inherits an
   unfinished page. */
static pthread_mutex_t page_lock = PTHREAD_MUTEX_INITIALIZER;

static void begin_child(void) {
    struct gate *inherited = atomic_exchange(&process_gate, NULL);
    /* Code of the child may still have pointers into the parent's page. Private memory replaces the
       mapping, so such code does not write into the parent's page. */
    if (inherited != NULL)
        mmap(inherited->page, LIVESHIFT_PAGE_SIZE, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    process_own_tid = 0;
    atomic_fetch_add(&generation, 1);
}

AT_FORK_LOCKED(FORK_PROCESS, page_lock, begin_child)

unsigned process_generation(void) { return atomic_load(&generation); }

int32_t process_tid(void) {
    process_own_tid = (int32_t)syscall(SYS_gettid);
    return process_own_tid;
}

/* Reads digits without strtol: headers of newer glibcs turn strtol into a name that older glibcs
   don't have. */
static int32_t number_from_environment(const char *name) {
    const char *text = getenv(name);
    int64_t value = 0;
    if (text == NULL || *text == '\0')
        return -1;
    for (; *text >= '0' && *text <= '9' && value <= INT32_MAX; text++)
        value = value * 10 + (*text - '0');
    return *text == '\0' && value <= INT32_MAX ? (int32_t)value : -1;
}

static void fill_header(struct liveshift_page *page, pid_t pid) {
    static const char *const kinds[] = {
#define X(kind, symbol, need) "gloo." #kind,
        LIVESHIFT_GLOO_ENTRY_POINTS(X)
#undef X
            "gloo.send",
        "gloo.recv",
#define X(name) "nccl." #name,
        LIVESHIFT_NCCL_OPERATIONS(X)
#undef X
    };
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(page, 0, sizeof *page);
    memcpy(page->magic, LIVESHIFT_PAGE_MAGIC, sizeof page->magic);
    page->layout = LIVESHIFT_PAGE_LAYOUT;
    page->kinds = KINDS;
    page->pid = pid;
    page->rank = number_from_environment("RANK");
    page->world_size = number_from_environment("WORLD_SIZE");
    page->local_rank = number_from_environment("LOCAL_RANK");
    page->created_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    page->order.check = ~0u; /* open, attempt 0, version 0 */
    snprintf(page->version, sizeof page->version, "%s", LIVESHIFT_VERSION);
    /* Not the kernel's comm: torch renames every main thread to pt_main_thread. */
    snprintf(page->command, sizeof page->command, "%s", program_invocation_short_name);
    for (unsigned i = 0; i < KINDS; i++)
        snprintf(page->counters[i].kind, sizeof page->counters[i].kind, "%s", kinds[i]);
}

bool process_path(char *path, const char *prefix, pid_t pid) {
    const char *directory = getenv("LIVESHIFT_PAGES");
    if (directory == NULL ||
        snprintf(path, PATH_MAX, "%s/%s%d", directory, prefix, pid) >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return false;
    }
    return true;
}

/*
 * Puts a new page at path and returns it mapped, or NULL with errno set and nothing left behind. It
 * fills the file by write(), because a full filesystem is then an error to report; touching the
 * mapping would be a SIGBUS that kills the rank. It renames the file into place: a page of the same
 * name can only belong to a dead process or to the program before an exec. It maps the file before:
 * the agent takes a page that its process has not mapped for such an older one.
 */
static struct liveshift_page *put_page(const char *draft, const char *path, pid_t pid) {
    static union {
        struct liveshift_page page;
        char bytes[LIVESHIFT_HEADER_SIZE];
    } first; /* under `page_lock` */
    fill_header(&first.page, pid);
    unlink(draft);
    int fd = open(draft, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0)
        return NULL;
    void *page = MAP_FAILED;
    ssize_t written = write(fd, &first, sizeof first);
    if (written == (ssize_t)sizeof first && ftruncate(fd, LIVESHIFT_ALLOCATIONS_AT) == 0)
        page = mmap(NULL, LIVESHIFT_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    else if (written >= 0 && written < (ssize_t)sizeof first)
        errno = ENOSPC;
    int failure = errno;
    close(fd); /* the mapping is enough; CRIU would have to dump and restore a descriptor */
    if (page == MAP_FAILED) {
        unlink(draft);
        errno = failure;
        return NULL;
    }
    if (rename(draft, path) == 0)
        return page;
    failure = errno;
    munmap(page, LIVESHIFT_PAGE_SIZE);
    unlink(draft);
    errno = failure;
    return NULL;
}

static struct liveshift_page *private_page(void) {
    struct liveshift_page *page = mmap(NULL, LIVESHIFT_PAGE_SIZE, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (page == MAP_FAILED)
        abort(); /* there are not even 5 MB of address space: malloc would fail next */
    fill_header(page, getpid());
    return page;
}

static struct liveshift_page *make_page(void) {
    const char *directory = getenv("LIVESHIFT_PAGES");
    if (directory == NULL || *directory == '\0')
        return private_page();
    char draft[PATH_MAX], path[PATH_MAX];
    struct liveshift_page *page = NULL;
    if (process_path(draft, ".", getpid()) && process_path(path, "", getpid()))
        page = put_page(draft, path, getpid());
    if (page != NULL)
        return page;
    /* A training job must not stop because it can't be counted; but say why its rate is missing. */
    dprintf(STDERR_FILENO,
            "liveshift: cannot make the page %d in LIVESHIFT_PAGES=%s: %s; "
            "collectives of this process are not counted\n",
            getpid(), directory, strerror(errno));
    return private_page();
}

struct gate *process_init(void) {
    int before = errno;
    pthread_mutex_lock(&page_lock);
    struct gate *gate = atomic_load_explicit(&process_gate, memory_order_relaxed);
    if (gate == NULL) {
        gate = &the_gate;
        gate_init(gate, make_page());
        atomic_store_explicit(&process_gate, gate, memory_order_release);
    }
    pthread_mutex_unlock(&page_lock);
    errno = before;
    return gate;
}

/* Makes sure that bytes [at, at + length) of the page have storage; false, with errno, if the
   filesystem is full. */
static bool reserve(struct gate *gate, size_t at, size_t length) {
    char path[PATH_MAX];
    int failure = 0;
    pthread_mutex_lock(&page_lock);
    bool has_file = gate == atomic_load(&process_gate) && process_path(path, "", gate->page->pid);
    int fd = has_file ? open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW) : -1;
    if (fd >= 0) { /* a private page needs no storage in a file */
        failure = posix_fallocate(fd, (off_t)at, (off_t)length);
        close(fd);
    } else if (has_file && errno != ENOENT)
        failure = errno;
    pthread_mutex_unlock(&page_lock);
    errno = failure;
    return failure == 0;
}

const char *process_next_row(struct gate *gate, uint32_t used, uint32_t most, size_t at,
                             size_t size) {
    uint32_t step = (uint32_t)(32768 / size); /* rows that get storage at a time */
    if (step > most)
        step = most;
    if (used >= most)
        return "the table is full";
    if (used % step == 0 && !reserve(gate, at + used * size, step * size))
        return strerror(errno);
    return NULL;
}

void process_warn_full(atomic_flag *warned, const char *what, const char *why,
                       const char *consequence) {
    if (!atomic_flag_test_and_set(warned))
        dprintf(STDERR_FILENO, "liveshift: no room for another %s in this process's page: %s; %s\n",
                what, why, consequence);
}
