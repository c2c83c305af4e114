// SPDX-License-Identifier: Apache-2.0
//
// Reads capsule-init's command line, which capsule_init.c explains, into struct options.

#include "capsule_init.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static _Noreturn void refuse(const char *what, const char *detail) {
    errno = 0;
    die(what, detail);
}

static void parse_groups(struct options *options, const char *list) {
    const char *p = list;
    while (*p != '\0') {
        char *end;
        unsigned long g = strtoul(p, &end, 10);
        if (end == p || options->group_count == MAX_GROUPS)
            refuse("cannot use group list", list);
        options->groups[options->group_count++] = (gid_t)g;
        p = *end == ',' ? end + 1 : end;
    }
}

static void add_mount(struct options *options, enum mount_kind kind, const char *source,
                      const char *target) {
    if (options->mount_count == MAX_MOUNTS)
        refuse("too many mounts, at", target);
    options->mounts[options->mount_count++] = (struct mount_op){kind, source, target, -1};
}

void parse_options(struct options *options, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *o = argv[i];
        int left = argc - i - 1;
        if (strcmp(o, "--hold") == 0) {
            options->hold = true;
        } else if (strcmp(o, "--proc") == 0) {
            add_mount(options, MOUNT_PROC, "proc", "/proc");
        } else if (strcmp(o, "--sysfs") == 0) {
            add_mount(options, MOUNT_SYSFS, "sysfs",
                      "/sys"); // shows this network namespace's devices
        } else if (strcmp(o, "--devpts") == 0) {
            add_mount(options, MOUNT_DEVPTS, "devpts", "/dev/pts");
        } else if (strcmp(o, "--bind") == 0 && left >= 2) {
            add_mount(options, MOUNT_BIND, argv[i + 1], argv[i + 2]);
            i += 2;
        } else if (strcmp(o, "--run") == 0 && left >= 1) {
            options->command = &argv[i + 1];
            return;
        } else if (left >= 1) {
            const char *v = argv[++i];
            if (strcmp(o, "--netns") == 0)
                options->netns = v;
            else if (strcmp(o, "--hostname") == 0)
                options->hostname = v;
            else if (strcmp(o, "--tmpfs") == 0)
                add_mount(options, MOUNT_TMPFS, "tmpfs", v);
            else if (strcmp(o, "--hide") == 0)
                add_mount(options, MOUNT_NOTHING, "tmpfs", v);
            else if (strcmp(o, "--open-directory") == 0)
                add_mount(options, OPEN_DIRECTORY, "", v);
            else if (strcmp(o, "--log") == 0)
                options->log = v;
            else if (strcmp(o, "--log-max") == 0)
                options->log_max = strtoull(v, NULL, 10);
            else if (strcmp(o, "--log-keep") == 0)
                options->log_keep = strtoull(v, NULL, 10);
            else if (strcmp(o, "--status") == 0)
                options->status = v;
            else if (strcmp(o, "--chdir") == 0)
                options->chdir = v;
            else if (strcmp(o, "--umask") == 0) {
                options->umask = (mode_t)(strtoul(v, NULL, 8) & 0777);
                options->has_umask = true;
            } else if (strcmp(o, "--pid-floor") == 0)
                options->pid_floor = v;
            else if (strcmp(o, "--groups") == 0)
                parse_groups(options, v);
            else if (strcmp(o, "--restore") == 0)
                options->restore_root = atoi(v);
            else if (strcmp(o, "--uid") == 0) {
                options->uid = (uid_t)strtoul(v, NULL, 10);
                options->has_user = true;
            } else if (strcmp(o, "--gid") == 0)
                options->gid = (gid_t)strtoul(v, NULL, 10);
            else
                refuse("unknown option", o);
        } else {
            refuse("unknown or incomplete option", o);
        }
    }
    if (options->restore_root <= 0 && !options->hold)
        refuse("needs", "--run COMMAND…, --restore PID or --hold");
}
