// SPDX-License-Identifier: Apache-2.0
//
// This is C, and does its work without a break. While the thread has our registers, we wait for
// nothing but this thread. We wait for it without a limit: if its cgroup is short of memory, the
// kernel may let it sleep for seconds at the end of any system call. If the agent is killed during
// these 50 µs, the thread goes on with wrong registers.

#include "remote.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef __x86_64__
int remote_userfaultfd(pid_t tid, int pidfd, uint64_t syscall_at, bool filtered) {
    (void)tid, (void)pidfd, (void)syscall_at, (void)filtered;
    return -ENOEXEC;
}
#else

// linux/ptrace.h
enum { GET_SIGMASK = 0x420a, SET_SIGMASK = 0x420b, GET_RSEQ = 0x420f, EVENT_STOP = 128 };
enum { OPTION_SUSPEND_SECCOMP = 1 << 21 };
enum { SYSCALL_STOP = SIGTRAP | 0x80, USER_CODE_64 = 0x33, USER_MODE_ONLY = 1 };
enum { SPINS = 200, SLEEP_NS = 20000, SLEEPS = 50000, LONG_SLEEP_NS = 1000000 };

struct rseq_configuration {
    uint64_t abi;
    uint32_t abi_size, signature, flags, pad;
};
struct rseq_section {
    uint32_t version, flags;
    uint64_t start, length, abort;
};

struct remote {
    pid_t tid;
    uint64_t syscall_at;
    struct user_regs_struct own;
    bool changed;
};

static bool read_word(const struct remote *thread, uint64_t from, void *to, size_t length) {
    struct iovec here = {to, length}, there = {(void *)from, length};
    return process_vm_readv(thread->tid, &here, 1, &there, 1, 0) == (ssize_t)length;
}

// Whether the thread is in a restartable sequence (rseq(2)). The kernel would not notice that we
// make the thread leave it.
static bool in_rseq(const struct remote *thread) {
    struct rseq_configuration about;
    if (ptrace((enum __ptrace_request)GET_RSEQ, thread->tid, sizeof about, &about) <= 0 ||
        about.abi == 0)
        return false;
    uint64_t at;
    struct rseq_section section;
    if (!read_word(thread, about.abi + 8, &at, sizeof at) || at == 0 ||
        !read_word(thread, at, &section, sizeof section))
        return false;
    return thread->own.rip - section.start < section.length;
}

// The kernel goes on with an interrupted poll(2) by restart_syscall(2). If CRIU interrupts that
// call later, nothing says that it was a poll without timeout, and the poll returns EINTR
// (interrupted_shim.c). So the thread makes the poll again, as after a signal that it ignores.
static int make_poll_again(struct remote *thread) {
    enum { ERESTARTNOHAND = 514, ERESTART_RESTARTBLOCK = 516 }; // linux/errno.h
    struct user_regs_struct *own = &thread->own;
    bool polls = own->orig_rax == SYS_poll && (int)own->rdx < 0; // without timeout
    if (!polls || (long long)own->rax != -ERESTART_RESTARTBLOCK)
        return 0;
    own->rax = (unsigned long long)-ERESTARTNOHAND;
    return ptrace(PTRACE_SETREGS, thread->tid, 0, own) == 0 ? 0 : -errno;
}

// Whether the instruction is still there. The process may have run another program since it was
// found; now that the thread is stopped, it cannot any more.
static bool is_syscall(const struct remote *thread) {
    unsigned char code[2];
    return read_word(thread, thread->syscall_at, code, sizeof code) && code[0] == 0x0f &&
           code[1] == 0x05;
}

static int next_stop(const struct remote *thread, int *status, bool *interrupted) {
    for (int64_t spin = 0;; spin++) {
        pid_t which = waitpid(thread->tid, status, WNOHANG | __WALL);
        if (which == thread->tid)
            return WIFSTOPPED(*status) ? 0 : -ESRCH;
        if (which < 0)
            return -ESRCH;
        if (spin < SPINS) {
            sched_yield();
            continue;
        }
        if (spin == SLEEPS)
            *interrupted = ptrace(PTRACE_INTERRUPT, thread->tid, 0, 0) == 0;
        nanosleep(&(struct timespec){.tv_nsec = spin < SLEEPS ? SLEEP_NS : LONG_SLEEP_NS}, NULL);
    }
}

// Lets the thread go on until it stops in the wanted way. It passes signals on to the thread; only
// signals that cannot be blocked can come. -EAGAIN: the thread made no system call for a second,
// for example since it is frozen (cgroups(7)); then it is stopped in a trap.
static int run_until(const struct remote *thread, int request, bool event, int *status) {
    bool interrupted = false;
    for (long signum = 0;;) {
        if (ptrace((enum __ptrace_request)request, thread->tid, 0, signum) != 0)
            return -errno;
        int rc = next_stop(thread, status, &interrupted);
        if (rc != 0)
            return rc;
        bool is_event = *status >> 16 == EVENT_STOP;
        if (event ? is_event : WSTOPSIG(*status) == SYSCALL_STOP)
            return 0;
        if (is_event && interrupted)
            return -EAGAIN;
        signum = is_event || WSTOPSIG(*status) == SYSCALL_STOP ? 0 : WSTOPSIG(*status);
    }
}

static long call(struct remote *thread, long number, uint64_t first) {
    struct user_regs_struct regs = thread->own;
    regs.rip = thread->syscall_at;
    regs.rax = (uint64_t)number;
    regs.orig_rax = (uint64_t)-1; // so that the kernel restarts no system call
    regs.rdi = first;
    thread->changed = true;
    int status;
    if (ptrace(PTRACE_SETREGS, thread->tid, 0, &regs) != 0)
        return -errno;
    for (int stop = 0; stop < 2; stop++) { // before the call, and after it
        int rc = run_until(thread, PTRACE_SYSCALL, false, &status);
        if (rc != 0)
            return rc;
    }
    return ptrace(PTRACE_GETREGS, thread->tid, 0, &regs) == 0 ? (long)regs.rax : -errno;
}

// Brings the thread back into a trap with its own registers. From there the kernel restarts a
// system call of its own that was interrupted.
static int restore_registers(struct remote *thread) {
    int status;
    if (!thread->changed)
        return 0;
    if (ptrace(PTRACE_INTERRUPT, thread->tid, 0, 0) != 0)
        return -errno;
    int rc = run_until(thread, PTRACE_CONT, true, &status);
    if (rc == 0 && ptrace(PTRACE_SETREGS, thread->tid, 0, &thread->own) != 0)
        rc = -errno;
    return rc;
}

static int make_and_copy(struct remote *thread, int pidfd) {
    uint64_t flags = O_CLOEXEC | O_NONBLOCK | USER_MODE_ONLY;
    long there = call(thread, SYS_userfaultfd, flags);
    if (there < 0)
        return (int)there;
    long here = syscall(SYS_pidfd_getfd, pidfd, (int)there, 0);
    int failed = here < 0 ? -errno : 0;
    long closed;
    do
        closed = call(thread, SYS_close, (uint64_t)there);
    while (closed == -EAGAIN);
    if (closed < 0 && here >= 0)
        close((int)here);
    return failed ? failed : closed < 0 ? (int)closed : (int)here;
}

int remote_userfaultfd(pid_t tid, int pidfd, uint64_t syscall_at, bool filtered) {
    struct remote thread = {.tid = tid, .syscall_at = syscall_at};
    struct iovec regs = {&thread.own, sizeof thread.own};
    uint64_t mask, all = UINT64_MAX;
    if (ptrace(PTRACE_GETREGSET, tid, NT_PRSTATUS, &regs) != 0)
        return -errno;
    if (regs.iov_len != sizeof thread.own || thread.own.cs != USER_CODE_64)
        return -ENOEXEC;
    int again = make_poll_again(&thread);
    if (again != 0)
        return again;
    if (!is_syscall(&thread) || in_rseq(&thread))
        return -EAGAIN;
    long options = PTRACE_O_TRACESYSGOOD;
    if (filtered && ptrace(PTRACE_SETOPTIONS, tid, 0, options | OPTION_SUSPEND_SECCOMP) != 0)
        return -EACCES;
    if (!filtered && ptrace(PTRACE_SETOPTIONS, tid, 0, options) != 0)
        return -errno;
    if (ptrace((enum __ptrace_request)GET_SIGMASK, tid, sizeof mask, &mask) != 0 ||
        ptrace((enum __ptrace_request)SET_SIGMASK, tid, sizeof all, &all) != 0)
        return -errno;
    int fd = make_and_copy(&thread, pidfd);
    int rc = restore_registers(&thread);
    if (rc == 0 && ptrace((enum __ptrace_request)SET_SIGMASK, tid, sizeof mask, &mask) != 0)
        rc = -errno;
    if (rc != 0 && fd >= 0) {
        close(fd);
        fd = rc;
    }
    return fd;
}

#endif
