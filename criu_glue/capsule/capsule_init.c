// SPDX-License-Identifier: Apache-2.0
//
// capsule-init: builds the sandbox of a capsule and stays in it as process 1.
//
//   capsule-init --netns FILE --hostname NAME --bind SRC DST … --tmpfs DST … [--proc] [--sysfs]
//                [--devpts] [--hide DIR …] [--open-directory DIR …] --log DIR --log-max BYTES
//                --log-keep N --status FILE --uid N --gid N --groups N,N --umask OCTAL --chdir DIR
//                --pid-floor N ( --run COMMAND ARG… | --restore PID | --hold )
//
//   --uid      owns the output pipes too, so that the user can open /dev/stdout and /dev/stderr
//   --hide     covers a directory, if it exists, with an empty read-only one
//   --run      starts COMMAND as the sandbox's root task, in its own time namespace
//   --restore  starts nothing: CRIU will restore a tree whose root task is PID. When CRIU detaches,
//              that task becomes our child. The sandbox ends with that task only after SIGUSR2,
//              since a failed restore may be tried again
//   --hold     starts nothing and stays until killed (a host of the lab)
//
// The outer process makes the namespaces, forks process 1, waits until the sandbox is ready, prints
// the pid of process 1 as its caller sees it, and exits. CRIU dumps and restores only the tree
// below process 1, so both sides of a move build the sandbox in the same way.
//
// Order matters:
//  - log and status files are opened before the mounts change, since they belong to the host;
//  - sources of bind mounts are taken before anything is mounted over them, so that a path below
//    /tmp can be put back into a private /tmp;
//  - the root task's stdio is made inside the sandbox (pipes, and /dev/null opened there), because
//    CRIU cannot dump a descriptor from another mount namespace;
//  - ns_last_pid is raised before the root task exists, so that the pids that CRIU itself takes
//    in this namespace at a restore never collide with the job's.
//
// The program is linked statically, so that the LD_PRELOAD of the job's environment has no effect.

#define _GNU_SOURCE
#include "capsule_init.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif

// After the end of its command a capsule waits at most this long (milliseconds) for tasks that the
// command has left behind, while one of them can still write to the capsule's output. The end of
// `exec > >(tee log)` needs milliseconds for the rest of its input. A daemon that keeps the output
// open would hold the job for ever. So the wait ends if no output comes for QUIET_MS, and the kernel
// kills what is left then, as in a container. It is FAILED_QUIET_MS after a failure: the other ranks
// fail of that one, and the job ends with the code that is reported first. After a SIGKILL process 1
// does not wait. Then a person wanted the end at once, or the kernel ended the command because memory
// was short, and the job goes back to a snapshot.
enum { LINGER_MS = 2000, QUIET_MS = 500, FAILED_QUIET_MS = 100 };

// Where process 1 keeps the write ends of the output pipes.
enum { OUT = 20, ERR = 21 };

static int status_fd = -1;

_Noreturn void die(const char *what, const char *detail) {
    if (errno != 0)
        fprintf(stderr, "capsule-init: %s %s: %s\n", what, detail, strerror(errno));
    else
        fprintf(stderr, "capsule-init: %s %s\n", what, detail);
    exit(125);
}

// ---- building the sandbox ----------------------------------------------------------------------

static void join_netns(const struct options *options) {
    if (options->netns == NULL)
        return;
    int fd = open(options->netns, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET) != 0)
        die("cannot join network namespace", options->netns);
    close(fd);
}

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        die("cannot write", path);
    close(fd);
}

static void build_sandbox(struct options *options) {
    if (options->hostname != NULL && sethostname(options->hostname, strlen(options->hostname)) != 0)
        die("cannot set hostname", options->hostname);
    mount_all(options);
    if (options->pid_floor != NULL)
        write_file("/proc/sys/kernel/ns_last_pid", options->pid_floor);
}

// ---- process 1 ------------------------------------------------------------------------------

static void report_end(int status) {
    char line[64];
    int n = WIFSIGNALED(status) ? snprintf(line, sizeof line, "signal %d\n", WTERMSIG(status))
                                : snprintf(line, sizeof line, "exit %d\n", WEXITSTATUS(status));
    write_all(status_fd, line, (size_t)n);
}

// The root task; `is_final` is true once the sandbox ends with this task. `until` is the time on
// CLOCK_MONOTONIC (milliseconds) when the sandbox ends at the latest, 0 before the root task's end.
// It ends at `quiet_until` if no output comes before, which then puts that off by `quiet`.
struct root {
    pid_t pid;
    bool is_final, reaped;
    int status;
    int64_t until; // never 0 by chance: the clock counts from the boot
    int64_t quiet_until;
    int quiet;
};

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void reap(struct root *root) {
    for (;;) {
        int s;
        pid_t pid = waitpid(-1, &s, WNOHANG);
        if (pid <= 0)
            return;
        if (pid == root->pid) {
            root->reaped = true;
            root->status = s;
        }
    }
}

// Called once, when the root task has ended. The status is written now, since the agent takes it
// for the end of the command: a task that is killed later has not failed. Without our write ends
// the output pipes end with the last task that can write to them. The agent cannot move the capsule
// any more: it misses them, and the root task.
static void begin_end(struct root *root) {
    report_end(root->status);
    close(OUT);
    close(ERR);
    bool is_killed = WIFSIGNALED(root->status) && WTERMSIG(root->status) == SIGKILL;
    root->quiet = root->status == 0 ? QUIET_MS : FAILED_QUIET_MS;
    root->until = now_ms() + (is_killed ? 0 : LINGER_MS);
    root->quiet_until = now_ms() + root->quiet;
}

// Milliseconds until the sandbox ends; -1 before the end of the root task.
static int time_left(const struct root *root) {
    if (root->until == 0)
        return -1;
    int64_t end = root->until < root->quiet_until ? root->until : root->quiet_until;
    int64_t left = end - now_ms();
    return left > 0 ? (int)left : 0;
}

static _Noreturn void serve(struct root root, int signals, int out, int err) {
    struct pollfd watch[3] = {{signals, POLLIN, 0}, {out, POLLIN, 0}, {err, POLLIN, 0}};
    for (;;) {
        if (poll(watch, 3, time_left(&root)) < 0 && errno != EINTR)
            _exit(125);
        struct signalfd_siginfo info;
        while (read(signals, &info, sizeof info) == (ssize_t)sizeof info) {
            if (info.ssi_signo == SIGUSR2 && !root.is_final) {
                root.is_final = true; // the agent signals that the restored tree runs
                if (kill(root.pid, 0) == 0)
                    root.reaped = false; // we reaped the task of an earlier attempt
            }
        }
        reap(&root);
        if (root.is_final && root.reaped && root.until == 0)
            begin_end(&root);
        for (int i = 1; i <= 2; i++)
            if (watch[i].fd >= 0 && (watch[i].revents & POLLIN))
                root.quiet_until = now_ms() + root.quiet;
        for (int i = 1; i <= 2; i++)
            if (watch[i].fd >= 0 && !drain(watch[i].fd, (uint32_t)i))
                watch[i].fd = -1;
        bool is_open = watch[1].fd >= 0 || watch[2].fd >= 0;
        if (root.until != 0 && (!is_open || time_left(&root) == 0)) {
            end_log();
            _exit(0); // the kernel kills all tasks that the command has left behind
        }
    }
}

static _Noreturn void run_process_one(struct options *options, int ready) {
    build_sandbox(options);
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGUSR2);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
    // Both ends stay open here until the root task ends: CRIU gets the write ends at a restore, and
    // at a dump the agent names the pipe to CRIU by its inode.
    int out[2], err[2];
    if (signals < 0 || pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0)
        die("cannot make", "pipes");
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    fcntl(err[0], F_SETFL, O_NONBLOCK);
    if (dup3(out[1], OUT, O_CLOEXEC) < 0 || dup3(err[1], ERR, O_CLOEXEC) < 0)
        die("cannot place", "pipes");
    close(out[1]);
    close(err[1]);
    // open(2) of /dev/stdout asks for the rights of the pipe's inode, which has mode 0600.
    if (options->has_user && (fchown(OUT, options->uid, options->gid) != 0 ||
                              fchown(ERR, options->uid, options->gid) != 0))
        die("cannot give the user the", "pipes");
    map_state_page(22);
    struct root root = {.pid = options->restore_root};
    if (options->command != NULL) {
        root.is_final = true;
        root.pid = fork();
        if (root.pid < 0)
            die("cannot fork", options->command[0]);
        if (root.pid == 0)
            run_command(options, OUT, ERR);
    }
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (chdir("/") != 0)
        die("cannot enter", "/");
    write_all(ready, "r", 1);
    close(ready);
    dup2(null, STDIN_FILENO);
    dup2(null, STDOUT_FILENO);
    dup2(null, STDERR_FILENO);
    prctl(PR_SET_NAME, "capsule-init", 0, 0, 0);
    serve(root, signals, out[0], err[0]);
}

int main(int argc, char **argv) {
    static struct options parsed;
    struct options *options = &parsed;
    parse_options(options, argc, argv);
    if (options->log != NULL)
        open_log(options->log, options->log_max, options->log_keep);
    const char *status = options->status != NULL ? options->status : "/dev/null";
    status_fd = open(status, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (status_fd < 0)
        die("cannot open", status);
    join_netns(options);
    int namespaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID;
    if (options->command != NULL)
        namespaces |= CLONE_NEWTIME; // at a restore CRIU makes it, with the right offsets
    if (unshare(namespaces) != 0)
        die("cannot unshare", "namespaces (root is needed)");
    int ready[2];
    if (pipe2(ready, O_CLOEXEC) != 0)
        die("cannot make", "pipe");
    pid_t process_one = fork();
    if (process_one < 0)
        die("cannot fork", "process 1");
    if (process_one == 0) {
        close(ready[0]);
        setsid(); // leave the terminal's session, so that a Ctrl-C there does not reach us
        run_process_one(options, ready[1]);
    }
    close(ready[1]);
    char r;
    if (read(ready[0], &r, 1) != 1) {
        int s;
        waitpid(process_one, &s, 0);
        return 125; // process 1 has printed the reason
    }
    printf("%d\n", (int)process_one);
    return 0;
}
