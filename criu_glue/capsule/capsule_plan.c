// SPDX-License-Identifier: Apache-2.0
//
// Reads capsule-init's command line, which capsule_init.c explains, into a plan.

#include "capsule_init.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void parse_groups(struct plan *plan, const char *list) {
    const char *p = list;
    while (*p != '\0') {
        char *end;
        unsigned long g = strtoul(p, &end, 10);
        if (end == p || plan->group_count == MAX_GROUPS) {
            errno = 0;
            die("cannot use group list", list);
        }
        plan->groups[plan->group_count++] = (gid_t)g;
        p = *end == ',' ? end + 1 : end;
    }
}

static void add_mount(struct plan *plan, enum mount_kind kind, const char *source,
                      const char *target) {
    if (plan->mount_count == MAX_MOUNTS) {
        errno = 0;
        die("too many mounts, at", target);
    }
    plan->mounts[plan->mount_count++] = (struct mount_op){kind, source, target, -1};
}

void parse_plan(struct plan *plan, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *o = argv[i];
        int left = argc - i - 1;
        if (strcmp(o, "--hold") == 0) {
            plan->hold = true;
        } else if (strcmp(o, "--proc") == 0) {
            add_mount(plan, MOUNT_PROC, "proc", "/proc");
        } else if (strcmp(o, "--sysfs") == 0) {
            add_mount(plan, MOUNT_SYSFS, "sysfs", "/sys"); // shows this network namespace's devices
        } else if (strcmp(o, "--devpts") == 0) {
            add_mount(plan, MOUNT_DEVPTS, "devpts", "/dev/pts");
        } else if (strcmp(o, "--bind") == 0 && left >= 2) {
            add_mount(plan, MOUNT_BIND, argv[i + 1], argv[i + 2]);
            i += 2;
        } else if (strcmp(o, "--run") == 0 && left >= 1) {
            plan->command = &argv[i + 1];
            return;
        } else if (left >= 1) {
            const char *v = argv[++i];
            if (strcmp(o, "--netns") == 0)
                plan->netns = v;
            else if (strcmp(o, "--hostname") == 0)
                plan->hostname = v;
            else if (strcmp(o, "--tmpfs") == 0)
                add_mount(plan, MOUNT_TMPFS, "tmpfs", v);
            else if (strcmp(o, "--hide") == 0)
                add_mount(plan, MOUNT_NOTHING, "tmpfs", v);
            else if (strcmp(o, "--open-directory") == 0)
                add_mount(plan, OPEN_DIRECTORY, "", v);
            else if (strcmp(o, "--log") == 0)
                plan->log = v;
            else if (strcmp(o, "--log-max") == 0)
                plan->log_max = strtoull(v, NULL, 10);
            else if (strcmp(o, "--log-keep") == 0)
                plan->log_keep = strtoull(v, NULL, 10);
            else if (strcmp(o, "--status") == 0)
                plan->status = v;
            else if (strcmp(o, "--chdir") == 0)
                plan->chdir = v;
            else if (strcmp(o, "--pid-floor") == 0)
                plan->pid_floor = v;
            else if (strcmp(o, "--groups") == 0)
                parse_groups(plan, v);
            else if (strcmp(o, "--adopt") == 0)
                plan->adopt = atoi(v);
            else if (strcmp(o, "--uid") == 0) {
                plan->uid = (uid_t)strtoul(v, NULL, 10);
                plan->has_user = true;
            } else if (strcmp(o, "--gid") == 0)
                plan->gid = (gid_t)strtoul(v, NULL, 10);
            else {
                errno = 0;
                die("unknown option", o);
            }
        } else {
            errno = 0;
            die("unknown or incomplete option", o);
        }
    }
    errno = 0;
    if (plan->adopt <= 0 && !plan->hold)
        die("needs", "--run COMMAND…, --adopt PID or --hold");
}
