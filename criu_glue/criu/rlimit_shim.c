// SPDX-License-Identifier: Apache-2.0
//
// CRIU preloads this library only if the agent's root lacks CAP_SYS_RESOURCE (containers, some
// virtual machines). CRIU reads every task's limits by prlimit64(pid, …, NULL, &old). If the task
// has another user, the kernel wants that capability even for a read (kernel/sys.c,
// check_prlimit_permission). But /proc/PID/limits shows the same values to every process that may
// ptrace the task. So if a read fails with EPERM, this library answers it from there. It changes
// nothing else; a write that the kernel refuses stays refused.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum { NAME_WIDTH = 26 }; // fs/proc/base.c, proc_pid_limits: "%-25s " in front of the values

static uint64_t parse_limit(const char *text) {
    return strncmp(text, "unlimited", 9) == 0 ? UINT64_MAX : strtoull(text, NULL, 10);
}

static int read_limit(long pid, long resource, struct rlimit64 *out) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%ld/limits", pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return -1;
    int rc = -1;
    // The file has a heading, then one line per resource in the order of their numbers.
    for (long at = -1; fgets(line, sizeof line, f) != NULL; at++) {
        char soft[32], hard[32];
        if (at != resource || strlen(line) <= NAME_WIDTH)
            continue;
        if (sscanf(line + NAME_WIDTH, "%31s %31s", soft, hard) == 2) {
            out->rlim_cur = parse_limit(soft);
            out->rlim_max = parse_limit(hard);
            rc = 0;
        }
        break;
    }
    fclose(f);
    return rc;
}

#define EXPORT __attribute__((visibility("default")))

// CRIU 4.2 calls syscall(); a build against another libc may call prlimit64().
EXPORT int prlimit64(pid_t pid, enum __rlimit_resource resource, const struct rlimit64 *new,
                     struct rlimit64 *old) {
    static int (*real)(pid_t, enum __rlimit_resource, const struct rlimit64 *, struct rlimit64 *);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "prlimit64");
    int rc = real(pid, resource, new, old);
    if (rc != 0 && errno == EPERM && pid != 0 && new == NULL && old != NULL)
        rc = read_limit(pid, (long)resource, old);
    return rc;
}

EXPORT long syscall(long n, ...) {
    static long (*real)(long, ...);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list list;
    va_start(list, n);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    long rc = real(n, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (rc != 0 && errno == EPERM && n == SYS_prlimit64 && a[0] != 0 && a[2] == 0 && a[3] != 0)
        rc = read_limit(a[0], a[1], (struct rlimit64 *)a[3]);
    return rc;
}
