// SPDX-License-Identifier: Apache-2.0
//
// The parts of capsule-init: capsule_init.c (main, process 1), capsule_options.c (the command
// line), capsule_mounts.c (the sandbox's mounts), capsule_task.c (the root task), capsule_output.c
// (the log).

#ifndef LIVESHIFT_CAPSULE_INIT_H
#define LIVESHIFT_CAPSULE_INIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_MOUNTS = 64, MAX_GROUPS = 256 };

enum mount_kind {
    MOUNT_BIND,
    MOUNT_TMPFS,
    MOUNT_PROC,
    MOUNT_SYSFS,
    MOUNT_DEVPTS,
    MOUNT_NOTHING,
    OPEN_DIRECTORY
};

struct mount_op {
    enum mount_kind kind;
    const char *source;
    const char *target;
    int tree; // the source, as a detached mount (binds only)
};

// The sandbox that the command line asks for.
struct options {
    const char *netns, *hostname, *log, *status, *chdir, *pid_floor;
    uint64_t log_max, log_keep;
    struct mount_op mounts[MAX_MOUNTS];
    int mount_count;
    bool has_user, has_umask;
    mode_t umask;
    uid_t uid;
    gid_t gid;
    gid_t groups[MAX_GROUPS];
    size_t group_count;
    pid_t restore_root;
    bool hold;
    char **command;
};

// Prints on stderr what went wrong, with errno unless that is 0, and exits with code 125.
_Noreturn void die(const char *what, const char *detail);

// Fills empty options from the command line; calls die() if the command line is invalid.
void parse_options(struct options *options, int argc, char **argv);

// Makes our mount namespace private and does the mounts of the options in it.
void mount_all(struct options *options);

// Called in a child of process 1: becomes the command of the options, or exits with 125, 126 or
// 127.
_Noreturn void run_command(const struct options *options, int out, int err);

// Writes all n bytes; returns false, with errno, if that fails.
bool write_all(int fd, const void *bytes, size_t n);

enum { STREAM_STDOUT = 1, STREAM_STDERR = 2 };

// Keeps the log in a directory of the host: the last `keep` segments of `max` bytes each.
void open_log(const char *directory, uint64_t max, uint64_t keep);

// Makes the page in which the agent reads the log's state, as descriptor `fd` of this process.
void map_state_page(int fd);

// Writes what waits in a non-blocking pipe into the log. Returns false at end of file.
bool drain(int fd, uint32_t stream);

// Call this at the end of all output: makes lost bytes at the end of the log visible to readers.
void end_log(void);

#endif
