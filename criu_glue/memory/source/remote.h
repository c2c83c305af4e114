// SPDX-License-Identifier: Apache-2.0
//
// A userfaultfd of another process, made in it and taken from it.

#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

// The thread is traced by the calling one and stands in a trap of PTRACE_INTERRUPT, where it stands
// again when this returns, as it was. syscall_at: a `syscall` instruction in the process; pidfd: of
// it; filtered: it has a seccomp filter, which must be suspended. The descriptor, or -errno:
//   -EACCES   the filter cannot be suspended
//   -EAGAIN   just now the thread must not be disturbed; another time, or another thread
//   -ENOEXEC  it does not run 64-bit code
//   -ESRCH    it has ended
int remote_userfaultfd(pid_t tid, int pidfd, uint64_t syscall_at, bool filtered);
