// SPDX-License-Identifier: Apache-2.0
//
// CRIU preloads this library in every dump. It makes a poll(2) without timeout go on afterwards, at
// the source and at the destination, as it does after a stop.
//
// To stop a thread, the kernel interrupts its system call, and later restarts most calls so that
// the program does not notice. CRIU restarts calls too, but not those for which the kernel keeps a
// record (ERESTART_RESTARTBLOCK; compel: infect.c, compel_get_task_regs): the record is lost when
// CRIU's own code runs in the task. These calls return EINTR, after a restore as well as where the
// task goes on. A program without signals does not expect EINTR: script(1), for example, ends at
// once. So CRIU reads the registers of a thread in a poll without timeout as those of a call that
// is made again. Where the task goes on at the source, the kernel still returns EINTR to a program
// whose handler of a signal ran meanwhile (ERESTARTNOHAND); CRIU itself does not tell the two apart.
// Only the kernel knows how much of a timeout is left, so a poll with a timeout still returns EINTR.
// So does one in which the thread was stopped before: it is in restart_syscall(2) since, which does
// not say which call it goes on with (memory/source/remote.c avoids that).

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/user.h>

#ifdef __x86_64__

enum {
    ERESTARTNOHAND = 514,
    ERESTART_RESTARTBLOCK = 516
}; // linux/errno.h; programs never see them

// The registers of a 32-bit program are shorter.
static void call_again(struct user_regs_struct *regs, size_t size) {
    if (size != sizeof *regs || regs->orig_rax != SYS_poll)
        return;
    int timeout = (int)regs->rdx;
    if ((long long)regs->rax == -ERESTART_RESTARTBLOCK && timeout < 0)
        regs->rax = (unsigned long long)-ERESTARTNOHAND;
}

#define EXPORT __attribute__((visibility("default")))

// CRIU 4.2 reads registers by PTRACE_GETREGSET only (compel: ptrace_get_regs).
EXPORT long ptrace(enum __ptrace_request request, ...) {
    static long (*real)(enum __ptrace_request, pid_t, void *, void *);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "ptrace");
    va_list list;
    va_start(list, request);
    pid_t pid = va_arg(list, pid_t);
    void *address = va_arg(list, void *);
    void *data = va_arg(list, void *);
    va_end(list);
    long rc = real(request, pid, address, data);
    if (rc == 0 && request == PTRACE_GETREGSET && address == (void *)NT_PRSTATUS) {
        const struct iovec *set = data;
        call_again(set->iov_base, set->iov_len);
    }
    return rc;
}

#endif
