// SPDX-License-Identifier: Apache-2.0
//
// capsule-init in parts: capsule_init.c (main, process 1), capsule_plan.c (what was asked for),
// capsule_mounts.c (what the room's tasks see of the file system), capsule_task.c (the root task),
// capsule_output.c (what it prints).

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

// What the command line asks for.
struct plan {
    const char *netns, *hostname, *log, *status, *chdir, *pid_floor;
    uint64_t log_max, log_keep;
    struct mount_op mounts[MAX_MOUNTS];
    int mount_count;
    bool has_user;
    uid_t uid;
    gid_t gid;
    gid_t groups[MAX_GROUPS];
    size_t group_count;
    pid_t adopt;
    bool hold;
    char **command;
};

// Says on stderr what went wrong, with errno unless that is 0, and ends with code 125.
_Noreturn void die(const char *what, const char *detail);

// Fills an empty plan from the command line; dies of one that cannot be meant.
void parse_plan(struct plan *plan, int argc, char **argv);

// In a mount namespace of our own: makes it private and does the plan's mounts.
void mount_all(struct plan *plan);

// In a child of process 1: becomes the plan's command, or ends with 125, 126 or 127.
_Noreturn void run_command(const struct plan *plan, int out, int err);

// Returns false, with errno, where not all of it could be written.
bool write_all(int fd, const void *bytes, size_t n);

enum { STREAM_STDOUT = 1, STREAM_STDERR = 2 };

// Keeps the log in a directory of the host: segments of `max` bytes, the last `keep` of them.
void open_log(const char *directory, uint64_t max, uint64_t keep);

// Makes what the agent reads of the log's state, as the descriptor `fd` of this process.
void share_page(int fd);

// Records what waits in a pipe that does not block. Returns false at end of file.
bool drain(int fd, uint32_t stream);

// Nothing more comes.
void end_log(void);

#endif
