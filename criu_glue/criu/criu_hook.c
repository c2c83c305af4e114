// SPDX-License-Identifier: Apache-2.0
//
// criu-hook: CRIU's action script, and the one that becomes CRIU.
//
//   criu-hook --become DIRECTORY HOOK COMMAND ARG…
//
//   As the action script it is called without arguments at every stage of a dump or restore (nine
//   times, while the job stands still, hence no shell), with CRTOOLS_SCRIPT_ACTION set by CRIU and
//   in the environment that CRIU has got from us:
//
//   LIVESHIFT_HOOK = "DIRECTORY HOLD MARK FILE"
//
//   DIRECTORY  number of the descriptor under which CRIU has our directory open
//   HOLD       the stage at which it waits: it writes "held" to the FIFO `held` and reads the
//              verdict from the FIFO `verdict`. Only "go", and CRIU alive, lets CRIU go on.
//              "go N" also makes N the room's ns_last_pid: what the tree starts has higher ids
//   MARK FILE  a stage at which FILE is made
//
// The directory is hidden in the room where CRIU works, and so is this program perhaps: both are
// reached as /proc/<CRIU's pid>/fd/<n>, which nobody there knows before CRIU is started. COMMAND is
// run with that path of DIRECTORY as --images-dir and of HOOK, this program, as --action-script.
//
// Linked statically: nothing to find in the room, and it starts in a tenth of a millisecond.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ARGUMENTS = 256, WORD = 64 };

static int fail(const char *what) {
    fprintf(stderr, "criu-hook: %s: %s\n", what, strerror(errno));
    return 1;
}

static int become(int argc, char **argv) {
    static char directory[WORD], hook[WORD];
    char *command[MAX_ARGUMENTS];
    int given = argc - 4, n = 0;
    if (given < 1 || given > MAX_ARGUMENTS - 5) {
        errno = E2BIG;
        return fail("arguments");
    }
    snprintf(directory, sizeof directory, "/proc/%d/fd/%d", getpid(), atoi(argv[2]));
    snprintf(hook, sizeof hook, "/proc/%d/fd/%d", getpid(), atoi(argv[3]));
    while (n < given) {
        command[n] = argv[4 + n];
        n++;
    }
    command[n++] = "--images-dir";
    command[n++] = directory;
    command[n++] = "--action-script";
    command[n++] = hook;
    command[n] = NULL;
    execvp(command[0], command);
    return fail(command[0]);
}

// Which ids new tasks get is of no consequence for the restore, so an error is none.
static void set_last_pid(const char *number) {
    int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
    if (fd >= 0 && write(fd, number, strlen(number)) >= 0)
        close(fd);
}

static int hold(int directory, pid_t criu) {
    char verdict[WORD] = "";
    size_t have = 0;
    int fd = openat(directory, "held", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "held\n", 5) != 5)
        return fail("held");
    close(fd);
    fd = openat(directory, "verdict", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fail("verdict");
    while (have < sizeof verdict - 1 && strchr(verdict, '\n') == NULL) {
        ssize_t n = read(fd, verdict + have, sizeof verdict - 1 - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        have += (size_t)n;
    }
    close(fd);
    // A CRIU that was killed meanwhile is not our parent any more.
    int goes = strcmp(verdict, "go\n") == 0 || strncmp(verdict, "go ", 3) == 0;
    if (!goes || getppid() != criu)
        return 1;
    if (verdict[2] == ' ')
        set_last_pid(verdict + 3);
    return 0;
}

static int mark(int directory, const char *file) {
    int fd = openat(directory, file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return fail(file);
    close(fd);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--become") == 0)
        return become(argc, argv);
    pid_t criu = getppid();
    const char *action = getenv("CRTOOLS_SCRIPT_ACTION"), *ours = getenv("LIVESHIFT_HOOK");
    char hold_at[WORD], mark_at[WORD], file[WORD], path[WORD];
    int number;
    if (action == NULL || ours == NULL ||
        sscanf(ours, "%d %63s %63s %63s", &number, hold_at, mark_at, file) != 4) {
        errno = EINVAL;
        return fail("environment");
    }
    int holds = strcmp(action, hold_at) == 0;
    if (!holds && strcmp(action, mark_at) != 0)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)criu, number);
    int directory = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0)
        return fail(path);
    return holds ? hold(directory, criu) : mark(directory, file);
}
