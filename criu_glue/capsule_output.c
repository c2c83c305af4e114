// SPDX-License-Identifier: Apache-2.0
//
// The log of what a capsule prints.

#define _GNU_SOURCE
#include "capsule_init.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// One record of the log: this header, then `length` bytes. Read by criu_glue/output.py.
struct record {
    uint64_t realtime_ns;
    uint32_t length;
    uint32_t stream;
};

bool write_all(int fd, const void *bytes, size_t n) {
    const char *p = bytes;
    while (n > 0) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

void log_record(int log, uint32_t stream, const char *bytes, size_t n) {
    static char buffer[sizeof(struct record) + 65536];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    struct record head = {(uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec, (uint32_t)n,
                          stream};
    // One write per record, so that a reader never meets half a header that stays half.
    memcpy(buffer, &head, sizeof head);
    if (n > 0)
        memcpy(buffer + sizeof head, bytes, n);
    struct stat before;
    bool known = fstat(log, &before) == 0;
    // The host's disk is full: the job goes on and this record is lost, but whole.
    if (!write_all(log, buffer, sizeof head + n) && known && ftruncate(log, before.st_size) != 0)
        return;
}

// Takes more than any pipe holds, but not for ever: a task that writes as fast as we read must not
// keep us from the other stream and from signals.
bool drain(int log, int fd, uint32_t stream) {
    static char bytes[65536];
    for (int round = 0; round < 32; round++) {
        ssize_t n = read(fd, bytes, sizeof bytes);
        if (n > 0)
            log_record(log, stream, bytes, (size_t)n);
        else if (n == 0)
            return false;
        else if (errno != EINTR)
            return true;
    }
    return true;
}
