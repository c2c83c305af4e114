// SPDX-License-Identifier: Apache-2.0
//
// Makes a userfaultfd inside another process and takes a copy of it.

#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

// The calling thread traces the thread tid, which is stopped by PTRACE_INTERRUPT. When the function
// returns, tid is stopped in the same way, with its own registers. syscall_at: the address of a
// `syscall` instruction in the process. pidfd: a pidfd of the process. filtered: the thread has a
// seccomp filter, which must be suspended. Returns the descriptor, or -errno:
//   -EACCES   the filter cannot be suspended
//   -EAGAIN   the thread must not be disturbed now: try later, or try another thread
//   -ENOEXEC  the thread does not run 64-bit code
//   -ESRCH    the thread has ended
int remote_userfaultfd(pid_t tid, int pidfd, uint64_t syscall_at, bool filtered);
