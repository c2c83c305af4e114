/* SPDX-License-Identifier: Apache-2.0 */
/* Starting a thread of the interposer inside the application's process. */
#ifndef LIVESHIFT_INTERPOSER_THREAD_H
#define LIVESHIFT_INTERPOSER_THREAD_H

/*
 * Starts a detached thread that takes no signals: the application's handlers must not run on it.
 * `name` (up to 15 characters) is what the kernel shows. Returns 0 or an errno value; ENOSYS: this
 * process has no thread library.
 */
int thread_start(const char *name, void (*body)(void *), void *argument);

#endif
