// SPDX-License-Identifier: Apache-2.0
//
// The root task of a capsule: what it may do, and how it begins.

#define _GNU_SOURCE
#include "capsule_init.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// The number of io_uring_setup is the same on x86-64, i386, aarch64 and arm. x32 adds a bit to it.
_Static_assert(SYS_io_uring_setup == 425, "another architecture's programs have another number");
#define X32_BIT 0x40000000U

// CRIU cannot dump an io_uring, but libuv (torch's TCPStore) opens one by default; since version
// 1.49 it does so even against UV_USE_IO_URING. So the job sees a kernel without io_uring: every
// user of io_uring has a fallback for ENOSYS. 32-bit programs do not see it either. We are still
// root, so no_new_privs is not needed.
static void hide_io_uring(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, ~X32_BIT),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        die("cannot hide", "io_uring by seccomp");
}

// Limits the capabilities of every root task in a capsule, also of one that becomes root later. It
// keeps those that containers usually have, and those that training needs (locked memory,
// priorities, limits). The others serve to run a machine. With them a job could uncover what the
// sandbox hides, join other capsules' namespaces or trace process 1.
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
    // Inheritable ones would come back at root's next exec in spite of the bounding set.
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &head, data) != 0)
        die("cannot read", "capabilities");
    data[0].inheritable = data[1].inheritable = 0; // the kernel then clears ambient ones too
    if (syscall(SYS_capset, &head, data) != 0)
        die("cannot set", "capabilities");
}

_Noreturn void run_command(const struct options *options, int out, int err) {
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
    if (options->has_user) {
        if (setgroups(options->group_count, options->groups) != 0 || setgid(options->gid) != 0 ||
            setuid(options->uid) != 0)
            die("cannot become user of", options->command[0]);
    }
    if (options->chdir != NULL && chdir(options->chdir) != 0) {
        fprintf(stderr, "liveshift: cannot enter %s on this host: %s\n", options->chdir,
                strerror(errno));
        _exit(126);
    }
    if (options->has_umask)
        umask(options->umask);
    execvp(options->command[0], options->command);
    int code = errno == ENOENT ? 127 : 126;
    fprintf(stderr, "liveshift: cannot run %s: %s\n", options->command[0], strerror(errno));
    _exit(code);
}
