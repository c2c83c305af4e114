// SPDX-License-Identifier: Apache-2.0
//
// The mounts of a sandbox.

#define _GNU_SOURCE
#include "capsule_init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

// The capsule has its own devpts, so the numbers of its terminals are free on every host, and it
// does not see the host's terminals. Opening /dev/ptmx finds the devpts at "pts" beside it (kernel:
// devpts.rst). Group 5 is "tty" on all distributions; grantpt(3) wants terminals to have it.
#define TERMINALS "newinstance,ptmxmode=0666,mode=0620,gid=5"

static void make_directories(const char *path) {
    char partial[4096];
    snprintf(partial, sizeof partial, "%s", path);
    for (char *p = partial + 1; *p != '\0'; p++) {
        if (*p != '/')
            continue;
        *p = '\0';
        mkdir(partial, 0755);
        *p = '/';
    }
    if (mkdir(partial, 0755) != 0 && errno != EEXIST)
        die("cannot make", path);
}

void mount_all(struct options *options) {
    // Private: our mounts do not appear on the host, and the host's unmounts do not reach us.
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        die("cannot make private", "/");
    for (int i = 0; i < options->mount_count; i++) {
        struct mount_op *m = &options->mounts[i];
        if (m->kind != MOUNT_BIND)
            continue;
        m->tree =
            open_tree(AT_FDCWD, m->source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
        if (m->tree < 0)
            die("cannot take", m->source);
    }
    for (int i = 0; i < options->mount_count; i++) {
        const struct mount_op *m = &options->mounts[i];
        int rc = 0;
        if (access(m->target, F_OK) != 0) {
            if (m->kind == MOUNT_NOTHING)
                continue;
            make_directories(m->target);
        }
        if (m->kind == MOUNT_BIND)
            rc = move_mount(m->tree, "", AT_FDCWD, m->target, MOVE_MOUNT_F_EMPTY_PATH);
        else if (m->kind == MOUNT_TMPFS)
            rc = mount("tmpfs", m->target, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
        else if (m->kind == MOUNT_DEVPTS)
            rc = mount("devpts", m->target, "devpts", MS_NOSUID | MS_NOEXEC, TERMINALS);
        else if (m->kind == MOUNT_NOTHING)
            rc = mount("tmpfs", m->target, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC,
                       "mode=0555,size=4k");
        else if (m->kind == OPEN_DIRECTORY)
            rc = chmod(m->target, 01777);
        else
            rc = mount(m->source, m->target, m->source, MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
        if (rc != 0)
            die("cannot mount", m->target);
        if (m->tree >= 0)
            close(m->tree);
    }
}
