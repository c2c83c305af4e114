/* SPDX-License-Identifier: Apache-2.0 */
#include "holders.h"

#include "control.h"

#include <dirent.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/uio.h>

static bool read_page(int pid, size_t offset, void *into, size_t bytes) {
    struct iovec here = {into, bytes};
    struct iovec there = {(void *)(CONTROL_ADDRESS + offset), bytes};
    return process_vm_readv(pid, &here, 1, &there, 1, 0) == (ssize_t)bytes;
}

void holders(void (*each)(int pid, const struct inventory *theirs, void *argument),
             void *argument) {
    DIR *processes = opendir("/proc");
    for (struct dirent *entry; processes != NULL && (entry = readdir(processes)) != NULL;) {
        int pid = atoi(entry->d_name);
        uint64_t magic;
        struct inventory theirs;
        if (pid > 0 && read_page(pid, offsetof(struct control, magic), &magic, sizeof magic) &&
            magic == CONTROL_MAGIC &&
            read_page(pid, offsetof(struct control, inventory), &theirs, sizeof theirs) &&
            theirs.count <= MAX_DEVICES)
            each(pid, &theirs, argument);
    }
    if (processes != NULL)
        closedir(processes);
}
