// SPDX-License-Identifier: Apache-2.0
//
// Which pages of a process were written, by the PAGEMAP_SCAN ioctl and a userfaultfd of the process
// that write-protects asynchronously (Linux 6.7): the kernel itself lifts the protection at a write.

#pragma once

#include "regions.h"
#include "sent.h"

// linux/fs.h, which is older than the kernel where this is built
enum {
    PAGE_WRITE_TRACKED = 1 << 0,
    PAGE_WRITTEN = 1 << 1,
    PAGE_OF_FILE = 1 << 2,
    PAGE_PRESENT = 1 << 3,
    PAGE_SWAPPED = 1 << 4,
    PAGE_ZERO_FRAME = 1 << 5,
    PAGE_GUARD = 1 << 8, // Linux 6.15; madvise(MADV_GUARD_INSTALL)
};

// Makes a userfaultfd one that tracks writes; 0 or -errno.
int scan_prepare(int uffd);

// The categories that this kernel lets a page be selected by, of those that matter here.
uint64_t scan_known(int pagemap);

// What a process has written in some ranges since the last call, as those pages are protected again;
// with whole also what is there and not current in sent. Ranges are pairs of start and end. All that
// is listed is recorded as not current. 0 or -errno, after which nothing is known of the pages:
//   -EPERM  the userfaultfd is not this address space's (it has run another program, or forked)
//   -EBUSY  somebody else has registered a part of it
int scan_written(int pagemap, int uffd, const uint64_t *ranges, size_t count, uint64_t known,
                 bool whole, struct sent *sent, struct regions *written);

// The pages that there are in some ranges of a process at a standstill. 0 or -errno.
int scan_present(int pagemap, const uint64_t *ranges, size_t count, uint64_t known,
                 struct regions *found);

// Adds what was found to the pages that there are, and those of which the destination has not surely
// got the content (all with distrust) to stale. 0 or -ENOMEM.
int scan_judge(const struct regions *found, bool distrust, struct sent *sent,
               struct regions *present, struct regions *stale);
