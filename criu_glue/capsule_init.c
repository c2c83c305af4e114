// SPDX-License-Identifier: Apache-2.0
//
// capsule-init: builds the room of a capsule and stays in it as process 1.
//
//   capsule-init --netns FILE --hostname NAME --bind SRC DST … --tmpfs DST … [--proc] [--sysfs]
//                [--hide DIR …] --log FILE --status FILE --uid N --gid N --groups N,N --chdir DIR
//                --pid-floor N ( --run COMMAND ARG… | --adopt PID | --hold )
//
//   --hide   covers a directory, if it is there, with an empty one that nobody can write into
//   --run    starts COMMAND as the room's root task, in a time namespace of its own
//   --adopt  starts nothing: CRIU will restore a tree whose root task is PID, and that
//            task, orphaned when CRIU detaches, becomes our child. Its end is the room's only
//            after SIGUSR2: a restore that fails may be tried again
//   --hold   starts nothing and stays until killed (a host of the lab)
//
// The outer process makes the namespaces, forks process 1, waits until the room is ready, prints
// the pid of process 1 as its caller sees it, and leaves. Nothing here is dumped by CRIU: it
// dumps and restores the tree below process 1 only, so both sides of a move build the room alike.
//
// Order matters:
//  - log and status files are opened before the mounts change, since they belong to the host;
//  - sources of bind mounts are taken before anything is mounted over them, so that a path below
//    /tmp can be put back into a private /tmp;
//  - the root task's stdio is made inside (pipes from here, /dev/null opened inside), because a
//    descriptor from another mount namespace stops a dump;
//  - ns_last_pid is raised before the root task exists, so that the pids that CRIU itself takes
//    in this namespace at a restore never collide with the job's.
//
// Linked statically, so that the LD_PRELOAD in the job's environment does not reach us.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#else
#error "capsule-init knows x86-64 and aarch64"
#endif

enum { MAX_MOUNTS = 64, MAX_GROUPS = 256 };
enum { STREAM_MARK = 0, STREAM_STDOUT = 1, STREAM_STDERR = 2 };

// One record of the log: this header, then `length` bytes. Read by criu_glue/output.py.
struct record {
    uint64_t realtime_ns;
    uint32_t length;
    uint32_t stream;
};

enum mount_kind { MOUNT_BIND, MOUNT_TMPFS, MOUNT_PROC, MOUNT_SYSFS, MOUNT_NOTHING, OPEN_DIRECTORY };

struct mount_op {
    enum mount_kind kind;
    const char *source;
    const char *target;
    int tree; // the source, as a detached mount (binds only)
};

static struct {
    const char *netns, *hostname, *log, *status, *chdir, *pid_floor;
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
} room;

static int log_fd = -1, status_fd = -1;

static _Noreturn void die(const char *what, const char *detail) {
    if (errno != 0)
        fprintf(stderr, "capsule-init: %s %s: %s\n", what, detail, strerror(errno));
    else
        fprintf(stderr, "capsule-init: %s %s\n", what, detail);
    exit(125);
}

// ---- the plan -------------------------------------------------------------------------------

static void parse_groups(const char *list) {
    const char *p = list;
    while (*p != '\0') {
        char *end;
        unsigned long g = strtoul(p, &end, 10);
        if (end == p || room.group_count == MAX_GROUPS) {
            errno = 0;
            die("cannot use group list", list);
        }
        room.groups[room.group_count++] = (gid_t)g;
        p = *end == ',' ? end + 1 : end;
    }
}

static void add_mount(enum mount_kind kind, const char *source, const char *target) {
    if (room.mount_count == MAX_MOUNTS) {
        errno = 0;
        die("too many mounts, at", target);
    }
    room.mounts[room.mount_count++] = (struct mount_op){kind, source, target, -1};
}

static void parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *o = argv[i];
        int left = argc - i - 1;
        if (strcmp(o, "--hold") == 0) {
            room.hold = true;
        } else if (strcmp(o, "--proc") == 0) {
            add_mount(MOUNT_PROC, "proc", "/proc");
        } else if (strcmp(o, "--sysfs") == 0) {
            add_mount(MOUNT_SYSFS, "sysfs", "/sys"); // shows this network namespace's devices
        } else if (strcmp(o, "--bind") == 0 && left >= 2) {
            add_mount(MOUNT_BIND, argv[i + 1], argv[i + 2]);
            i += 2;
        } else if (strcmp(o, "--run") == 0 && left >= 1) {
            room.command = &argv[i + 1];
            return;
        } else if (left >= 1) {
            const char *v = argv[++i];
            if (strcmp(o, "--netns") == 0)
                room.netns = v;
            else if (strcmp(o, "--hostname") == 0)
                room.hostname = v;
            else if (strcmp(o, "--tmpfs") == 0)
                add_mount(MOUNT_TMPFS, "tmpfs", v);
            else if (strcmp(o, "--hide") == 0)
                add_mount(MOUNT_NOTHING, "tmpfs", v);
            else if (strcmp(o, "--open-directory") == 0)
                add_mount(OPEN_DIRECTORY, "", v);
            else if (strcmp(o, "--log") == 0)
                room.log = v;
            else if (strcmp(o, "--status") == 0)
                room.status = v;
            else if (strcmp(o, "--chdir") == 0)
                room.chdir = v;
            else if (strcmp(o, "--pid-floor") == 0)
                room.pid_floor = v;
            else if (strcmp(o, "--groups") == 0)
                parse_groups(v);
            else if (strcmp(o, "--adopt") == 0)
                room.adopt = atoi(v);
            else if (strcmp(o, "--uid") == 0) {
                room.uid = (uid_t)strtoul(v, NULL, 10);
                room.has_user = true;
            } else if (strcmp(o, "--gid") == 0)
                room.gid = (gid_t)strtoul(v, NULL, 10);
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
    if (room.adopt <= 0 && !room.hold)
        die("needs", "--run COMMAND…, --adopt PID or --hold");
}

// ---- building the room ----------------------------------------------------------------------

static void join_netns(void) {
    if (room.netns == NULL)
        return;
    int fd = open(room.netns, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET) != 0)
        die("cannot join network namespace", room.netns);
    close(fd);
}

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        die("cannot write", path);
    close(fd);
}

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

static void do_mounts(void) {
    // Private: what is mounted here is nobody else's, and a host's unmount is not ours.
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        die("cannot make private", "/");
    for (int i = 0; i < room.mount_count; i++) {
        struct mount_op *m = &room.mounts[i];
        if (m->kind != MOUNT_BIND)
            continue;
        m->tree =
            open_tree(AT_FDCWD, m->source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
        if (m->tree < 0)
            die("cannot take", m->source);
    }
    for (int i = 0; i < room.mount_count; i++) {
        const struct mount_op *m = &room.mounts[i];
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

static void build_room(void) {
    if (room.hostname != NULL && sethostname(room.hostname, strlen(room.hostname)) != 0)
        die("cannot set hostname", room.hostname);
    do_mounts();
    if (room.pid_floor != NULL)
        write_file("/proc/sys/kernel/ns_last_pid", room.pid_floor);
}

// ---- the root task --------------------------------------------------------------------------

// CRIU cannot dump an io_uring, and libuv (torch's TCPStore) opens one unasked, whatever
// UV_USE_IO_URING says since its 1.49. To the job the kernel looks like one without: ENOSYS is
// what every user of io_uring has a fallback for. Needs no no_new_privs, as we are still root.
static void hide_io_uring(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        die("cannot hide", "io_uring by seccomp");
}

// What root keeps in a capsule, whoever made it root: what containers usually leave it, and what
// training asks for (locked memory, priorities, limits). The rest is for running a machine; with it
// a job could take away what the room hides, join other capsules' namespaces or trace process 1.
static void drop_capabilities(void) {
    static const int kept[] = {
        CAP_CHOWN,
        CAP_DAC_OVERRIDE,
        CAP_FOWNER,
        CAP_FSETID,
        CAP_KILL,
        CAP_SETGID,
        CAP_SETUID,
        CAP_SETPCAP,
        CAP_SETFCAP,
        CAP_NET_RAW,
        CAP_SYS_CHROOT,
        CAP_AUDIT_WRITE,
        CAP_NET_BIND_SERVICE,
        CAP_IPC_LOCK,
        CAP_IPC_OWNER,
        CAP_SYS_RESOURCE,
        CAP_SYS_NICE,
        CAP_LEASE,
        CAP_NET_BROADCAST,
    };
    for (int cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++) {
        bool keep = false;
        for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++)
            keep = keep || kept[i] == cap;
        if (!keep && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) != 0)
            die("cannot drop", "capabilities");
    }
    // Inheritable ones would come back at root's next exec, whatever the bounding set says.
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &head, data) != 0)
        die("cannot read", "capabilities");
    data[0].inheritable = data[1].inheritable = 0; // ambient ones go with them
    if (syscall(SYS_capset, &head, data) != 0)
        die("cannot set", "capabilities");
}

static _Noreturn void run_command(int out, int err) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int s = 1; s < NSIG; s++)
        signal(s, SIG_DFL); // a background shell starts its children with SIGINT ignored
    setsid();               // CRIU wants the session leader inside the tree
    int in = open("/dev/null", O_RDONLY);
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    close_range(3, ~0U, 0);
    hide_io_uring();
    drop_capabilities();
    if (room.has_user) {
        if (setgroups(room.group_count, room.groups) != 0 || setgid(room.gid) != 0 ||
            setuid(room.uid) != 0)
            die("cannot become user of", room.command[0]);
    }
    if (room.chdir != NULL && chdir(room.chdir) != 0) {
        fprintf(stderr, "liveshift: cannot enter %s on this host: %s\n", room.chdir,
                strerror(errno));
        _exit(126);
    }
    execvp(room.command[0], room.command);
    int code = errno == ENOENT ? 127 : 126;
    fprintf(stderr, "liveshift: cannot run %s: %s\n", room.command[0], strerror(errno));
    _exit(code);
}

// ---- process 1 ------------------------------------------------------------------------------

static bool write_all(int fd, const void *bytes, size_t n) {
    const char *p = bytes;
    while (n > 0) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

static void log_record(uint32_t stream, const char *bytes, size_t n) {
    static char buffer[sizeof(struct record) + 65536];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    struct record head = {(uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec, (uint32_t)n,
                          stream};
    // One write per record, so that a reader never meets half a header that stays half.
    memcpy(buffer, &head, sizeof head);
    if (n > 0)
        memcpy(buffer + sizeof head, bytes, n);
    struct stat before;
    bool known = fstat(log_fd, &before) == 0;
    // The host's disk is full: the job goes on and this record is lost, but whole.
    if (!write_all(log_fd, buffer, sizeof head + n) && known &&
        ftruncate(log_fd, before.st_size) != 0)
        return;
}

// Returns false at end of file. Takes more than any pipe holds, but not for ever: a task that
// writes as fast as we read must not keep us from the other stream and from signals.
static bool drain(int fd, uint32_t stream) {
    static char bytes[65536];
    for (int round = 0; round < 32; round++) {
        ssize_t n = read(fd, bytes, sizeof bytes);
        if (n > 0)
            log_record(stream, bytes, (size_t)n);
        else if (n == 0)
            return false;
        else if (errno != EINTR)
            return true;
    }
    return true;
}

static void report_end(int status) {
    char line[64];
    int n = WIFSIGNALED(status) ? snprintf(line, sizeof line, "signal %d\n", WTERMSIG(status))
                                : snprintf(line, sizeof line, "exit %d\n", WEXITSTATUS(status));
    write_all(status_fd, line, (size_t)n);
}

// The root task; `ours` once its end is the room's end.
struct root {
    pid_t pid;
    bool ours, reaped;
    int status;
};

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

static _Noreturn void serve(struct root root, int signals, int out, int err) {
    struct pollfd watch[3] = {{signals, POLLIN, 0}, {out, POLLIN, 0}, {err, POLLIN, 0}};
    for (;;) {
        if (poll(watch, 3, -1) < 0 && errno != EINTR)
            _exit(125);
        bool mark = false;
        struct signalfd_siginfo info;
        while (read(signals, &info, sizeof info) == (ssize_t)sizeof info) {
            if (info.ssi_signo == SIGUSR1)
                mark = true; // the agent: everything written so far must be in the log
            else if (info.ssi_signo == SIGUSR2 && !root.ours) {
                root.ours = true; // the agent: the restored tree was let go
                if (kill(root.pid, 0) == 0)
                    root.reaped = false; // that was an attempt before this one
            }
        }
        reap(&root);
        for (int i = 1; i <= 2; i++)
            if (watch[i].fd >= 0 && !drain(watch[i].fd, (uint32_t)i))
                watch[i].fd = -1;
        if (mark)
            log_record(STREAM_MARK, NULL, 0);
        if (root.ours && root.reaped) {
            report_end(root.status);
            _exit(0); // the kernel ends whatever the command left behind
        }
    }
}

static _Noreturn void be_process_one(int ready) {
    build_room();
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGUSR1);
    sigaddset(&watched, SIGUSR2);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
    // Both ends stay open here: CRIU is handed the write ends at a restore, and the pipe's
    // identity (its inode) is what the agent names to CRIU at a dump.
    int out[2], err[2];
    if (signals < 0 || pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0)
        die("cannot make", "pipes");
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    fcntl(err[0], F_SETFL, O_NONBLOCK);
    if (dup3(out[1], 20, O_CLOEXEC) < 0 || dup3(err[1], 21, O_CLOEXEC) < 0)
        die("cannot place", "pipes");
    struct root root = {.pid = room.adopt};
    if (room.command != NULL) {
        root.ours = true;
        root.pid = fork();
        if (root.pid < 0)
            die("cannot fork", room.command[0]);
        if (root.pid == 0)
            run_command(20, 21);
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
    parse(argc, argv);
    const char *log = room.log != NULL ? room.log : "/dev/null";
    log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log_fd < 0)
        die("cannot open", log);
    const char *status = room.status != NULL ? room.status : "/dev/null";
    status_fd = open(status, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (status_fd < 0)
        die("cannot open", status);
    join_netns();
    int spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID;
    if (room.command != NULL)
        spaces |= CLONE_NEWTIME; // on a restore CRIU makes it, with the right offsets
    if (unshare(spaces) != 0)
        die("cannot unshare", "namespaces (root is needed)");
    int ready[2];
    if (pipe2(ready, O_CLOEXEC) != 0)
        die("cannot make", "pipe");
    pid_t one = fork();
    if (one < 0)
        die("cannot fork", "process 1");
    if (one == 0) {
        close(ready[0]);
        setsid(); // not in the terminal's session: a Ctrl-C there is not meant for us
        be_process_one(ready[1]);
    }
    close(ready[1]);
    char r;
    if (read(ready[0], &r, 1) != 1) {
        int s;
        waitpid(one, &s, 0);
        return 125; // process 1 has said why
    }
    printf("%d\n", (int)one);
    return 0;
}
