// SPDX-License-Identifier: Apache-2.0
//
// earlier-copy LIMIT RANGES: holds a copy of what is in the memory of processes that are about to end,
// so that it need not come over the wire should they come back to this host.
//
// It reads lines "PID START END" (the latter two in hexadecimal, page-aligned) from the descriptor
// RANGES, copies those pages that are there and not zero, LIMIT bytes of them at most, and says how many
// bytes that were. What cannot be read is left out. Then it waits for the end of its standard input:
// whoever started it has let go of it, or has died.
//
// A process of its own, so that the kernel takes it first should memory get short (it says so by
// itself), and that whoever looks for pages in processes finds these like any other's. Nobody may
// trace it but root. Static: it takes no library along.

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "page.h"

enum { BATCH = 256 };

static const uint64_t PRESENT = 1ULL << 63, SWAPPED = 1ULL << 62; // Documentation/…/pagemap.rst

static uint8_t *copy;
static uint64_t copied, limit;

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    return 1;
}

// One more page behind the others; false when there is no room for it.
static bool keep(const uint8_t *page) {
    if (page_is_zero(page))
        return true;
    if (copied + PAGE > limit)
        return false;
    memcpy(copy + copied, page, PAGE);
    copied += PAGE;
    return true;
}

// Pages that are there, as far as they can be read: a guard page looks like one, and cannot.
static bool take_run(int mem, uint64_t at, size_t count) {
    static uint8_t pages[BATCH * PAGE];
    while (count > 0) {
        ssize_t got = pread(mem, pages, count * PAGE, (off_t)at);
        size_t whole = got > 0 ? (size_t)got / PAGE : 0;
        for (size_t n = 0; n < whole; n++)
            if (!keep(pages + n * PAGE))
                return false;
        whole += whole < count; // the one that could not be read
        at += whole * PAGE;
        count -= whole;
    }
    return true;
}

// Not by process_vm_readv: it would give a forked child its own copy of each page first.
static bool take(int mem, int pagemap, uint64_t start, uint64_t end) {
    static uint64_t entries[BATCH];
    for (uint64_t at = start; at < end; at += BATCH * PAGE) {
        size_t most = (end - at) / PAGE < BATCH ? (end - at) / PAGE : BATCH;
        ssize_t got =
            pread(pagemap, entries, most * sizeof *entries, (off_t)(at / PAGE * sizeof *entries));
        size_t count = got > 0 ? (size_t)got / sizeof *entries : 0;
        for (size_t first = 0, last; first < count; first = last) {
            bool there = entries[first] & (PRESENT | SWAPPED);
            for (last = first + 1;
                 last < count && there == !!(entries[last] & (PRESENT | SWAPPED));)
                last++;
            if (there && !take_run(mem, at + first * PAGE, last - first))
                return false;
        }
    }
    return true;
}

static int open_of(long pid, const char *name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/%s", pid, name);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static int die_first(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "1000", 4) != 4)
        return fail("oom_score_adj");
    close(fd);
    return prctl(PR_SET_DUMPABLE, 0) ? fail("prctl") : 0;
}

int main(int argc, char **argv) {
    FILE *ranges = argc == 3 ? fdopen(atoi(argv[2]), "r") : NULL;
    if (ranges == NULL)
        return 2;
    limit = strtoull(argv[1], NULL, 10) / PAGE * PAGE;
    if (die_first())
        return 1;
    copy = mmap(NULL, limit + PAGE, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (copy == MAP_FAILED)
        return fail("mmap");
    madvise(copy, limit, MADV_HUGEPAGE); // where there are none it takes longer
    long pid, open_pid = 0;
    uint64_t start, end;
    int mem = -1, pagemap = -1;
    while (fscanf(ranges, "%ld %" SCNx64 " %" SCNx64, &pid, &start, &end) == 3) {
        if (pid != open_pid) {
            close(mem), close(pagemap);
            mem = open_of(pid, "mem"), pagemap = open_of(pid, "pagemap");
            open_pid = pid;
        }
        if (!take(mem, pagemap, start, end))
            break;
    }
    close(mem), close(pagemap); // they keep address spaces that have no task any more
    fclose(ranges);
    printf("%" PRIu64 "\n", copied);
    fflush(stdout);
    while (getchar() != EOF) {
    }
    return 0;
}
