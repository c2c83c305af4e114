// SPDX-License-Identifier: Apache-2.0

#include "scan.h"

#include <errno.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <sys/ioctl.h>

// linux/fs.h and linux/userfaultfd.h; those on the build host may be older than the kernel.
struct pm_scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
enum { PROTECT_MATCHING = 1 << 0, REFUSE_UNTRACKED = 1 << 1 };
enum { FEATURE_WP = 1 << 0, FEATURE_WP_UNPOPULATED = 1 << 13, FEATURE_WP_ASYNC = 1 << 15 };

// One call scans at most this many bytes. During a call the kernel holds the lock of the address
// space (20 ms per GiB of existing pages), so mmap() in the process waits for that long.
#define WINDOW (UINT64_C(128) << 20)

enum { BATCH = 4096 }; // regions per call

int scan_enable(int uffd) {
    struct uffdio_api api = {
        .api = UFFD_API,
        .features = FEATURE_WP | FEATURE_WP_UNPOPULATED | FEATURE_WP_ASYNC,
    };
    return ioctl(uffd, UFFDIO_API, &api) == 0 ? 0 : -errno;
}

static struct pm_scan_arg page_arguments(uint64_t known) {
    // These are the pages that CRIU would dump: they exist, and are not pages of a file, the
    // kernel's zero page or guards.
    uint64_t not = (PAGE_OF_FILE | PAGE_ZERO_FRAME | PAGE_GUARD) & known;
    return (struct pm_scan_arg){
        .size = sizeof(struct pm_scan_arg),
        .category_inverted = not,
        .category_mask = not,
        .category_anyof_mask = PAGE_PRESENT | PAGE_SWAPPED,
        .return_mask = PAGE_WRITTEN | PAGE_WRITE_TRACKED,
    };
}

static bool knows(int pagemap, uint64_t categories) {
    struct pm_scan_arg nothing = {.size = sizeof nothing, .category_mask = categories};
    return ioctl(pagemap, PAGEMAP_SCAN, &nothing) == 0;
}

uint64_t scan_categories(int pagemap) {
    uint64_t first = PAGE_WRITE_TRACKED | PAGE_WRITTEN | PAGE_OF_FILE | PAGE_PRESENT |
                     PAGE_SWAPPED | PAGE_ZERO_FRAME;
    if (knows(pagemap, first | PAGE_GUARD))
        return first | PAGE_GUARD;
    return knows(pagemap, first) ? first : 0;
}

// Adds to the list all pages in [start, end) that the arguments select.
static int scan(int pagemap, struct pm_scan_arg args, uint64_t start, uint64_t end,
                struct regions *list) {
    while (start < end) {
        int rc = regions_reserve(list, BATCH);
        if (rc != 0)
            return rc;
        args.start = start;
        args.end = end - start > WINDOW ? start + WINDOW : end;
        args.vec = (uintptr_t)(list->at + list->count);
        args.vec_len = BATCH;
        int found = ioctl(pagemap, PAGEMAP_SCAN, &args);
        if (found < 0)
            return -errno;
        for (int i = 0; i < found; i++)
            list->bytes +=
                list->at[list->count + (size_t)i].end - list->at[list->count + (size_t)i].start;
        list->count += (size_t)found;
        // walk_end may lie before the regions that were found. After a call that reached its end,
        // the kernel leaves it where 512 regions were last full (6.18, do_pagemap_scan).
        start = args.walk_end;
        if (found > 0 && list->at[list->count - 1].end > start)
            start = list->at[list->count - 1].end;
    }
    return 0;
}

static int track(int uffd, uint64_t start, uint64_t end) {
    struct uffdio_register range = {.range = {.start = start, .len = end - start},
                                    .mode = UFFDIO_REGISTER_MODE_WP};
    return ioctl(uffd, UFFDIO_REGISTER, &range) == 0 ? 0 : -errno;
}

static bool is_listed_whole(struct region part) {
    return part.categories & PAGE_WRITTEN || !(part.categories & PAGE_WRITE_TRACKED);
}

// Adds to stale the pages of the part whose content the destination may not have.
static int add_stale(struct sent *sent, struct region part, bool all_stale, struct regions *stale) {
    bool whole = all_stale || is_listed_whole(part);
    for (uint64_t at = part.start, end; at < part.end; at = end) {
        bool current = false;
        end = whole ? part.end : sent_run_end(sent, at, part.end, &current);
        int rc = current ? 0 : sent_invalidate(sent, at, end);
        if (rc == 0 && !current)
            rc = regions_add(stale, at, end);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int add_all_stale(struct sent *sent, const struct regions *found, bool all_stale,
                         struct regions *stale) {
    int rc = 0;
    for (size_t i = 0; i < found->count && rc == 0; i++)
        rc = add_stale(sent, found->at[i], all_stale, stale);
    return rc;
}

// Does the work of scan_written for one range. found must be empty, and after an error its content
// is undefined.
static int written_in(int pagemap, int uffd, struct pm_scan_arg args, uint64_t start, uint64_t end,
                      bool whole, struct sent *sent, struct regions *found,
                      struct regions *written) {
    args.flags = PROTECT_MATCHING | REFUSE_UNTRACKED;
    struct pm_scan_arg only_written = args;
    only_written.category_mask |= PAGE_WRITTEN;
    int rc = scan(pagemap, whole ? args : only_written, start, end, found);
    bool all_stale = rc == -EPERM;
    if (all_stale) {
        // A part of the range is a mapping that is not tracked. So all pages count as written:
        // those that the failed call has protected, and those that such a mapping has from an
        // earlier one (mremap).
        regions_clear(found);
        rc = track(uffd, start, end);
        if (rc == -ENOMEM || rc == -ESRCH)
            return -EPERM; // the address space of the userfaultfd does not exist any more
        if (rc == -EINVAL || rc == -ENOENT) {
            // A part was unmapped meanwhile, or cannot be tracked; the pass at the freeze reads
            // that part. But the failed call may have protected pages in the rest of the range.
            args.flags = PROTECT_MATCHING;
            rc = 0;
        }
        if (rc == 0)
            rc = scan(pagemap, args, start, end, found);
    }
    return rc != 0 ? rc : add_all_stale(sent, found, all_stale, written);
}

int scan_written(int pagemap, int uffd, const uint64_t *ranges, size_t count, uint64_t known,
                 bool whole, struct sent *sent, struct regions *written) {
    struct pm_scan_arg args = page_arguments(known);
    struct regions found = {0};
    int rc = 0;
    for (size_t i = 0; i < count && rc == 0; i++) {
        regions_clear(&found);
        rc = written_in(pagemap, uffd, args, ranges[2 * i], ranges[2 * i + 1], whole, sent, &found,
                        written);
    }
    free(found.at);
    return rc;
}

int scan_present(int pagemap, const uint64_t *ranges, size_t count, uint64_t known,
                 struct regions *found) {
    struct pm_scan_arg args = page_arguments(known);
    int rc = 0;
    for (size_t i = 0; i < count && rc == 0; i++)
        rc = scan(pagemap, args, ranges[2 * i], ranges[2 * i + 1], found);
    return rc;
}

int scan_classify(const struct regions *found, bool all_stale, struct sent *sent,
                  struct regions *present, struct regions *stale) {
    int rc = 0;
    for (size_t i = 0; i < found->count && rc == 0; i++)
        rc = regions_add(present, found->at[i].start, found->at[i].end);
    return rc != 0 ? rc : add_all_stale(sent, found, all_stale, stale);
}
