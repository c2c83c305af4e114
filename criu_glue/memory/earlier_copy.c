// SPDX-License-Identifier: Apache-2.0
//
// earlier-copy LIMIT: holds a copy of what is in the memory of processes that are about to end, so
// that it need not come over the wire should they come back to this host.
//
// It reads lines "PID START END" (the latter two in hexadecimal, page-aligned) up to an empty one,
// copies those pages that are there and not zero, and says how many bytes that were; more than LIMIT
// or a process that cannot be read is an error, said and the end. Then it waits for the end of its
// standard input: whoever started it has let go of it, or has died.
//
// A process of its own, so that the kernel takes it first should memory get short (it says so by
// itself), and that whoever looks for pages in processes finds these like any other's. Nobody may
// trace it but root. Static: it takes no library along.

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
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

// One more page behind the others; 0, or an error that was said.
static int keep(const uint8_t *page) {
    if (page_is_zero(page))
        return 0;
    if (copied + PAGE > limit) {
        fprintf(stderr, "there are more than %" PRIu64 " bytes\n", limit);
        return 1;
    }
    memcpy(copy + copied, page, PAGE);
    copied += PAGE;
    return 0;
}

// Not by process_vm_readv: it would give a forked child its own copy of each page first.
static int take(int mem, int pagemap, uint64_t start, uint64_t end) {
    static uint64_t entries[BATCH];
    static uint8_t pages[BATCH * PAGE];
    for (uint64_t at = start; at < end; at += BATCH * PAGE) {
        size_t count = (end - at) / PAGE < BATCH ? (end - at) / PAGE : BATCH;
        ssize_t size = (ssize_t)(count * sizeof *entries);
        if (pread(pagemap, entries, (size_t)size, (off_t)(at / PAGE * sizeof *entries)) != size)
            return fail("pagemap");
        for (size_t first = 0, last; first < count; first = last) {
            for (last = first; last < count && entries[last] & (PRESENT | SWAPPED);)
                last++;
            size = (ssize_t)((last - first) * PAGE);
            if (size > 0 && pread(mem, pages, (size_t)size, (off_t)(at + first * PAGE)) != size)
                return fail("memory");
            for (size_t n = 0; n < last - first; n++)
                if (keep(pages + n * PAGE))
                    return 1;
            while (last < count && !(entries[last] & (PRESENT | SWAPPED)))
                last++;
        }
    }
    return 0;
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
    if (argc != 2)
        return 2;
    limit = strtoull(argv[1], NULL, 10) / PAGE * PAGE;
    if (die_first())
        return 1;
    copy = mmap(NULL, limit + PAGE, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (copy == MAP_FAILED)
        return fail("mmap");
    madvise(copy, limit, MADV_HUGEPAGE); // where there are none it takes longer
    char line[128];
    long pid, open_pid = 0;
    uint64_t start, end;
    int mem = -1, pagemap = -1;
    while (fgets(line, sizeof line, stdin) != NULL && line[0] != '\n') {
        if (sscanf(line, "%ld %" SCNx64 " %" SCNx64, &pid, &start, &end) != 3)
            return 2;
        if (pid != open_pid) {
            close(mem), close(pagemap);
            mem = open_of(pid, "mem"), pagemap = open_of(pid, "pagemap");
            open_pid = pid;
        }
        if (mem < 0 || pagemap < 0)
            return fail("no such process");
        if (take(mem, pagemap, start, end))
            return 1;
    }
    close(mem), close(pagemap); // they keep address spaces that have no task any more
    printf("%" PRIu64 "\n", copied);
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
    }
    return 0;
}
