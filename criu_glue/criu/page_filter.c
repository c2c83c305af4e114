// SPDX-License-Identifier: Apache-2.0
//
// The page filter: CRIU preloads it when the tracker carries memory. CRIU asks the kernel by the
// PAGEMAP_SCAN ioctl (Linux 6.7) which pages of a task it must dump. For the ranges that the
// tracker carries, this library answers "no pages", so CRIU's images have them as ranges without
// content. It changes nothing else.
// LIVESHIFT_PAGE_FILTER is "<descriptor of CRIU's directory>:<milliseconds>". The agent writes the
// ranges into the file `hide` of that directory, one a line: pid, start, end (hexadecimal). It can
// list them only once all tasks have stopped. CRIU makes its first scan of a task only then. So at
// that scan the library makes the file `asked`, which shows that all tasks have stopped, and waits
// for `hide`, at most the given milliseconds. Without `hide` nothing is hidden.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// From linux/fs.h; the header of the build machine may be older than the kernel.
struct page_region {
    uint64_t start, end, categories;
};
struct pm_scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_SWAPPED (1 << 4)

enum { PAGE_SIZE = 4096, POLL_NS = 300 * 1000 };

struct range {
    long pid;
    uint64_t start, end;
};

static struct {
    pthread_mutex_t lock;
    bool asked;
    struct range *ranges; // sorted by pid and address
    size_t count;
} hide = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int in_order(const void *left, const void *right) {
    const struct range *a = left, *b = right;
    if (a->pid != b->pid)
        return a->pid < b->pid ? -1 : 1;
    return a->start < b->start ? -1 : a->start > b->start;
}

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static FILE *open_with_timeout(int directory, uint64_t timeout_ms) {
    for (uint64_t until = now_ms() + timeout_ms;;) {
        int fd = openat(directory, "hide", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (fd >= 0)
            return fdopen(fd, "re");
        if (errno != ENOENT || now_ms() > until)
            return NULL;
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
}

static void read_ranges(void) {
    const char *text = getenv("LIVESHIFT_PAGE_FILTER");
    int directory;
    unsigned timeout_ms;
    if (text == NULL || sscanf(text, "%d:%u", &directory, &timeout_ms) != 2)
        return;
    int asked = openat(directory, "asked", O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (asked >= 0)
        close(asked);
    FILE *f = open_with_timeout(directory, timeout_ms);
    if (f == NULL)
        return;
    struct range next;
    size_t room = 0;
    while (fscanf(f, "%ld %" SCNx64 " %" SCNx64, &next.pid, &next.start, &next.end) == 3) {
        if (hide.count == room) {
            room = room ? 2 * room : 1024;
            struct range *larger = realloc(hide.ranges, room * sizeof next);
            if (larger == NULL)
                break; // go on with the ranges that we have
            hide.ranges = larger;
        }
        hide.ranges[hide.count++] = next;
    }
    fclose(f);
    if (hide.count)
        qsort(hide.ranges, hide.count, sizeof next, in_order);
}

// Returns the pid whose pagemap `fd` is; 0 for CRIU's own pagemap and for other files.
static long scanned_pid(int fd) {
    char link[64], path[256], *end;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    char *file = strrchr(path, '/');
    if (file == NULL || strcmp(file, "/pagemap") != 0)
        return 0;
    *file = '\0';
    char *number = strrchr(path, '/');
    long pid = strtol(number ? number + 1 : path, &end, 10);
    return *end == '\0' && pid != getpid() ? pid : 0;
}

// Returns the task's first range that ends behind the address; NULL if there is none.
static const struct range *next_range(long pid, uint64_t address) {
    size_t low = 0, high = hide.count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const struct range *at = &hide.ranges[middle];
        if (at->pid < pid || (at->pid == pid && at->end <= address))
            low = middle + 1;
        else
            high = middle;
    }
    return low < hide.count && hide.ranges[low].pid == pid ? &hide.ranges[low] : NULL;
}

typedef int (*ioctl_call)(int, unsigned long, ...);

// Asks the kernel for each stretch between the hidden ranges, one after the other.
static int scan_around(ioctl_call real, int fd, struct pm_scan_arg *asked, long pid) {
    struct pm_scan_arg part = *asked;
    struct page_region *out = (struct page_region *)(uintptr_t)asked->vec;
    int found = 0;
    for (uint64_t at = asked->start; at < asked->end;) {
        const struct range *hidden = next_range(pid, at);
        uint64_t end = asked->end;
        if (hidden != NULL && hidden->start <= at) {
            asked->walk_end = at = hidden->end < end ? hidden->end : end;
            continue;
        }
        if (hidden != NULL && hidden->start < end)
            end = hidden->start;
        part.start = at;
        part.end = end;
        part.vec = (uintptr_t)(out + found);
        part.vec_len = asked->vec_len - (uint64_t)found;
        int more = real(fd, PAGEMAP_SCAN, &part);
        if (more < 0)
            return more;
        for (int i = 0; i < more && asked->max_pages; i++)
            part.max_pages -= (out[found + i].end - out[found + i].start) / PAGE_SIZE;
        found += more;
        asked->walk_end = at = part.walk_end;
        bool full = (uint64_t)found == asked->vec_len || (asked->max_pages && !part.max_pages);
        if (part.walk_end < end || full)
            break;
    }
    return found;
}

static bool selects_pages(const struct pm_scan_arg *asked) {
    return asked->category_anyof_mask & (PAGE_IS_PRESENT | PAGE_IS_SWAPPED) && asked->vec_len;
}

__attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...) {
    static ioctl_call real;
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (real == NULL)
        real = (ioctl_call)dlsym(RTLD_NEXT, "ioctl");
    if (request != PAGEMAP_SCAN || argument == NULL || !selects_pages(argument))
        return real(fd, request, argument);
    long pid = scanned_pid(fd);
    if (pid == 0)
        return real(fd, request, argument);
    pthread_mutex_lock(&hide.lock);
    if (!hide.asked)
        read_ranges();
    hide.asked = true;
    pthread_mutex_unlock(&hide.lock);
    return hide.count ? scan_around(real, fd, argument, pid) : real(fd, request, argument);
}
