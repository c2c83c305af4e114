// SPDX-License-Identifier: Apache-2.0
//
// Finds the pages that a process has written. It uses the PAGEMAP_SCAN ioctl and a userfaultfd of
// the process that write-protects asynchronously (Linux 6.7): at a write the kernel lifts the
// protection by itself.

#pragma once

#include "regions.h"
#include "sent.h"

// Copied from linux/fs.h. The header on the build host may be older than the kernel.
enum {
    PAGE_WRITE_TRACKED = 1 << 0,
    PAGE_WRITTEN = 1 << 1,
    PAGE_OF_FILE = 1 << 2,
    PAGE_PRESENT = 1 << 3,
    PAGE_SWAPPED = 1 << 4,
    PAGE_ZERO_FRAME = 1 << 5,
    PAGE_GUARD = 1 << 8, // Linux 6.15; madvise(MADV_GUARD_INSTALL)
};

// Makes a userfaultfd track writes. Returns 0 or -errno.
int scan_enable(int uffd);

// Returns those of the categories above that this kernel knows. 0: it has no PAGEMAP_SCAN.
uint64_t scan_categories(int pagemap);

// Adds to written the pages in ranges that the process has written since the last call, and
// protects them again. With whole it also adds the pages that exist and are not current in sent.
// ranges are count pairs of start and end. The function marks all added pages as not current in
// sent. Returns 0 or -errno; after an error it is not known which pages were written:
//   -EPERM  the userfaultfd belongs to another address space: the process has run another program,
//           or was forked
//   -EBUSY  another userfaultfd has a part of the ranges registered
int scan_written(int pagemap, int uffd, const uint64_t *ranges, size_t count, uint64_t known,
                 bool whole, struct sent *sent, struct regions *written);

// Adds to found the pages that exist in ranges of a frozen process. 0 or -errno.
int scan_present(int pagemap, const uint64_t *ranges, size_t count, uint64_t known,
                 struct regions *found);

// Adds all found pages to present. Adds to stale those whose content the destination may not have;
// with all_stale these are all. 0 or -ENOMEM.
int scan_classify(const struct regions *found, bool all_stale, struct sent *sent,
                  struct regions *present, struct regions *stale);
