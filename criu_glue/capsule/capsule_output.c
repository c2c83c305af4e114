// SPDX-License-Identifier: Apache-2.0
//
// The log of what a capsule prints: a directory of segments, read by criu_glue/capsule/output.py.
//
// A segment's name is the offset in the whole log at which it begins. So an offset stays valid when
// old segments are removed and when the log moves. A new segment begins when the last one is full,
// and after bytes that could not be written: bytes that no segment covers are lost. We look for the
// last segment only when the first record comes, since at a destination the log arrives after the
// sandbox is built.

#define _GNU_SOURCE
#include "capsule_init.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// One record: this header, then `length` bytes.
struct record {
    uint64_t realtime_ns;
    uint32_t length;
    uint32_t stream;
};

// The page that the agent reads (output.py has the same layout). `end` is the offset where the next
// record will begin, UNKNOWN before the first one. `error` is the errno of the last record's write,
// 0 if it was written.
struct state_page {
    uint64_t end;
    uint64_t busy; // 1: output that was taken from a pipe may not be in the log yet
    uint64_t lost; // bytes of records, since the sandbox was built
    uint64_t error;
};

#define UNKNOWN UINT64_MAX

enum { NAME = 20 };                              // digits of a segment's name
enum { RECORD = sizeof(struct record) + 65536 }; // bytes of a record at most
// A disk that was full again and again leaves short segments. At most this many may exist beyond
// `keep`.
enum { SHORT_SEGMENTS = 1000 };

static struct {
    int directory, segment;
    uint64_t begins, end; // where the segment begins, and where the whole log ends
    uint64_t max, keep;
    struct state_page *state_page;
} output_log = {.directory = -1, .segment = -1, .end = UNKNOWN};

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

void open_log(const char *directory, uint64_t max, uint64_t keep) {
    output_log.max = max;
    output_log.keep = keep;
    output_log.directory = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (output_log.directory < 0)
        die("cannot open", directory);
}

void map_state_page(int fd) {
    int memory = memfd_create("capsule-output", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, sizeof *output_log.state_page) != 0 ||
        dup3(memory, fd, O_CLOEXEC) < 0)
        die("cannot make", "the page of the output");
    output_log.state_page =
        mmap(NULL, sizeof *output_log.state_page, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (output_log.state_page == MAP_FAILED)
        die("cannot map", "the page of the output");
    output_log.state_page->end = UNKNOWN;
    close(memory);
}

static void publish(uint64_t *field, uint64_t value) {
    __atomic_store_n(field, value, __ATOMIC_SEQ_CST);
}

// Returns the number of segments; sets their bytes and where the first and last one begin.
static uint64_t scan_segments(uint64_t *first, uint64_t *last, uint64_t *bytes) {
    uint64_t count = 0;
    struct stat found;
    *bytes = 0;
    int fd = openat(output_log.directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listed = fd < 0 ? NULL : fdopendir(fd);
    if (listed == NULL) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    for (struct dirent *each; (each = readdir(listed)) != NULL;) {
        if (strspn(each->d_name, "0123456789") != NAME || each->d_name[NAME] != '\0')
            continue;
        uint64_t begins = strtoull(each->d_name, NULL, 10);
        *first = count == 0 || begins < *first ? begins : *first;
        *last = count == 0 || begins > *last ? begins : *last;
        if (fstatat(fd, each->d_name, &found, AT_SYMLINK_NOFOLLOW) == 0)
            *bytes += (uint64_t)found.st_size;
        count++;
    }
    closedir(listed);
    return count;
}

static const char *segment_name(uint64_t begins) {
    static char name[NAME + 1];
    snprintf(name, sizeof name, "%0*" PRIu64, (int)NAME, begins);
    return name;
}

static bool open_segment(uint64_t begins) {
    int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW;
    output_log.segment = openat(output_log.directory, segment_name(begins), flags, 0600);
    output_log.begins = begins;
    return output_log.segment >= 0;
}

static void close_segment(void) {
    close(output_log.segment);
    output_log.segment = -1;
}

// Finds the end of the log that is here, so that new records follow it.
static void find_end(void) {
    uint64_t first = 0, last = 0, bytes;
    struct stat found;
    output_log.end = 0;
    if (scan_segments(&first, &last, &bytes) > 0 && open_segment(last)) {
        if (fstat(output_log.segment, &found) == 0)
            output_log.end = last + (uint64_t)found.st_size;
        else
            close_segment();
    }
    publish(&output_log.state_page->end, output_log.end);
}

// Begins a segment at the end of the log and removes the oldest ones beyond the limit. Each time
// the disk was full, a segment ended short. Short ones count by their bytes, so that they do not
// push out full segments.
static bool next_segment(void) {
    uint64_t first = 0, last = 0, bytes, count;
    uint64_t full =
        output_log.max > RECORD ? output_log.max - RECORD : 0; // a full segment has at least these
    if (!open_segment(output_log.end))
        return false;
    while ((count = scan_segments(&first, &last, &bytes)) > output_log.keep &&
           (bytes > (output_log.keep - 1) * full || count > output_log.keep + SHORT_SEGMENTS))
        if (unlinkat(output_log.directory, segment_name(first), 0) != 0)
            break;
    return true;
}

static bool append(const void *bytes, size_t n) {
    if (output_log.end == UNKNOWN)
        find_end();
    if (output_log.segment >= 0 && output_log.end > output_log.begins &&
        output_log.end + n > output_log.begins + output_log.max)
        close_segment();
    if (output_log.segment < 0 && !next_segment())
        return false;
    return write_all(output_log.segment, bytes, n);
}

// Called if a write fails, for example on a full disk: the job goes on, and the record is lost.
// Its bytes still count in the offset, so that the name of the next segment shows the gap.
static void drop_record(size_t n, int why) {
    if (output_log.segment >= 0) {
        if (ftruncate(output_log.segment, (off_t)(output_log.end - output_log.begins)) == 0 &&
            output_log.end == output_log.begins)
            unlinkat(output_log.directory, segment_name(output_log.begins), 0);
        close_segment();
    }
    output_log.end += n;
    publish(&output_log.state_page->lost, output_log.state_page->lost + n);
    publish(&output_log.state_page->error, (uint64_t)why);
}

static void log_record(uint32_t stream, const char *bytes, size_t n) {
    static char buffer[RECORD];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    struct record head = {(uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec, (uint32_t)n,
                          stream};
    memcpy(buffer, &head, sizeof head);
    memcpy(buffer + sizeof head, bytes, n);
    n += sizeof head;
    if (append(buffer, n)) {
        output_log.end += n;
        publish(&output_log.state_page->error, 0);
    } else {
        drop_record(n, errno);
    }
    publish(&output_log.state_page->end, output_log.end);
}

// Reads more than a pipe holds, but at most 32 times: a task that writes as fast as we read must
// not keep us from the other stream and from signals.
bool drain(int fd, uint32_t stream) {
    static char bytes[65536];
    bool open = true;
    publish(&output_log.state_page->busy, 1);
    for (int round = 0; open && round < 32; round++) {
        ssize_t n = read(fd, bytes, sizeof bytes);
        if (n > 0 && output_log.directory >= 0)
            log_record(stream, bytes, (size_t)n);
        else if (n == 0)
            open = false;
        else if (n < 0 && errno != EINTR)
            break;
    }
    publish(&output_log.state_page->busy, 0);
    return open;
}

void end_log(void) {
    if (output_log.segment < 0 && output_log.state_page->lost > 0)
        next_segment(); // an empty segment shows readers how much is lost at the end
}
