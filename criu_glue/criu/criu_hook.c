// SPDX-License-Identifier: Apache-2.0
//
// criu-hook: CRIU's action script, and the program that execs CRIU.
//
//   criu-hook --exec DIRECTORY HOOK COMMAND ARG…
//
//   CRIU calls it as the action script, without arguments, at every stage of a dump or restore.
//   These are nine calls while the job is frozen, so it is no shell script. CRIU sets
//   CRTOOLS_SCRIPT_ACTION, and passes on this variable, which the agent set for CRIU:
//
//   LIVESHIFT_HOOK = "DIRECTORY BEGIN HOLD MARK FILE"
//
//   DIRECTORY  number of the descriptor under which CRIU has our directory open
//   BEGIN      the stage at which the hook waits until CRIU may begin: it writes "ready" to the FIFO
//              `held`, and reads the verdict from the FIFO `begin`. CRIU goes on only if the verdict
//              is "go". If the agent ends, which keeps both FIFOs open, CRIU ends too
//   HOLD       the stage at which the hook waits: it writes "held" to the FIFO `held` and reads the
//              verdict from the FIFO `verdict`. CRIU goes on only if the verdict is "go" and CRIU
//              is alive. "go N" also sets the sandbox's ns_last_pid to N, so that processes that
//              the tree starts get higher ids
//   MARK FILE  the stage at which the hook makes FILE
//
// The directory is hidden in the sandbox where CRIU works, and this program may be hidden too. CRIU
// reaches both as /proc/<CRIU's pid>/fd/<n>, a path that is known only once CRIU has its pid.
// COMMAND gets that path of DIRECTORY as --images-dir, and that of HOOK, this program, as
// --action-script.
//
// It is linked statically, so it needs no library of the sandbox and starts in 0.1 ms.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ARGUMENTS = 256, FIELD = 64 };

static int fail(const char *what) {
    fprintf(stderr, "criu-hook: %s: %s\n", what, strerror(errno));
    return 1;
}

static int exec_criu(int argc, char **argv) {
    static char directory[FIELD], hook[FIELD];
    char *command[MAX_ARGUMENTS];
    int arguments = argc - 4, n = 0;
    if (arguments < 1 || arguments > MAX_ARGUMENTS - 5) {
        errno = E2BIG;
        return fail("arguments");
    }
    snprintf(directory, sizeof directory, "/proc/%d/fd/%d", getpid(), atoi(argv[2]));
    snprintf(hook, sizeof hook, "/proc/%d/fd/%d", getpid(), atoi(argv[3]));
    while (n < arguments) {
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

// The restore does not depend on the ids of new tasks, so errors are ignored.
static void set_last_pid(const char *number) {
    int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
    if (fd >= 0 && write(fd, number, strlen(number)) >= 0)
        close(fd);
}

// Reads one line into `verdict`, which has FIELD bytes, all of them zero. If the descriptor is
// non-blocking, the function also returns when the FIFO has no writer any more, or had none from the
// start.
static void read_verdict(int fd, char *verdict) {
    size_t have = 0;
    while (have < FIELD - 1 && strchr(verdict, '\n') == NULL) {
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        ssize_t n = read(fd, verdict + have, FIELD - 1 - have);
        if (n < 0 && errno == EAGAIN)
            poll(&wait, 1, -1);
        else if (n == 0 || (n < 0 && errno != EINTR))
            break;
        else if (n > 0)
            have += (size_t)n;
    }
}

static int wait_to_begin(int directory) {
    char verdict[FIELD] = "";
    int fd = openat(directory, "held", O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || write(fd, "ready\n", 6) != 6)
        return fail("held");
    close(fd);
    fd = openat(directory, "begin", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return fail("begin");
    read_verdict(fd, verdict);
    close(fd);
    return strcmp(verdict, "go\n") != 0;
}

static int wait_for_verdict(int directory, pid_t criu) {
    char verdict[FIELD] = "";
    int fd = openat(directory, "held", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "held\n", 5) != 5)
        return fail("held");
    close(fd);
    fd = openat(directory, "verdict", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fail("verdict");
    read_verdict(fd, verdict);
    close(fd);
    // If CRIU was killed meanwhile, it is no longer our parent.
    int may_go_on = strcmp(verdict, "go\n") == 0 || strncmp(verdict, "go ", 3) == 0;
    if (!may_go_on || getppid() != criu)
        return 1;
    if (verdict[2] == ' ')
        set_last_pid(verdict + 3);
    return 0;
}

static int make_mark(int directory, const char *file) {
    int fd = openat(directory, file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return fail(file);
    close(fd);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--exec") == 0)
        return exec_criu(argc, argv);
    pid_t criu = getppid();
    const char *action = getenv("CRTOOLS_SCRIPT_ACTION"),
               *agent_variable = getenv("LIVESHIFT_HOOK");
    char begin_at[FIELD], wait_at[FIELD], mark_at[FIELD], file[FIELD], path[FIELD];
    int number;
    if (action == NULL || agent_variable == NULL ||
        sscanf(agent_variable, "%d %63s %63s %63s %63s", &number, begin_at, wait_at, mark_at,
               file) != 5) {
        errno = EINVAL;
        return fail("environment");
    }
    int begins = strcmp(action, begin_at) == 0, waits = strcmp(action, wait_at) == 0;
    if (!begins && !waits && strcmp(action, mark_at) != 0)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)criu, number);
    int directory = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0)
        return fail(path);
    if (begins)
        return wait_to_begin(directory);
    return waits ? wait_for_verdict(directory, criu) : make_mark(directory, file);
}
