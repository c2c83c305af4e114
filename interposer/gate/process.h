/* SPDX-License-Identifier: Apache-2.0 */
/* This process as the rest of liveshift sees it: its page and its gate, one of each. */
#ifndef LIVESHIFT_INTERPOSER_PROCESS_H
#define LIVESHIFT_INTERPOSER_PROCESS_H

#include "gate.h"

#include <stddef.h>

extern _Atomic(struct gate *) process_gate; /* NULL until first needed, and again after a fork */
extern __thread int32_t process_own_tid __attribute__((tls_model("initial-exec")));

struct gate *process_begin(void);
int32_t process_tid(void);

/* This process's gate, making its page if it has none. Never fails: where no page can be had there
   is one that nobody sees, whose gate stays open. */
static inline struct gate *gate_here(void) {
    struct gate *gate = atomic_load_explicit(&process_gate, memory_order_acquire);
    return __builtin_expect(gate != NULL, 1) ? gate : process_begin();
}

/* gettid() without its system call. */
static inline int32_t tid_here(void) {
    return __builtin_expect(process_own_tid != 0, 1) ? process_own_tid : process_tid();
}

/* How often this process's line has forked: what was found out under another number is a parent's. */
unsigned process_generation(void);

/*
 * Fork handlers, made known as the library is loaded and not when first needed: the child of a fork
 * that is under way in another thread at that moment has what was begun meanwhile, and no handler
 * (glibc 2.36 and later). Higher orders are called earlier before a fork, so a lock that is taken
 * within another has the lower one.
 */
enum { FORK_LEDGER = 201, FORK_PROCESS, FORK_ROWS, FORK_FLIGHTS, FORK_CONTEXTS };
#define AT_FORK(order, prepare, parent, child)                                                     \
    static __attribute__((constructor(order))) void handle_fork(void) {                            \
        pthread_atfork(prepare, parent, child);                                                    \
    }

/* Makes sure that bytes [at, at + length) of the page have storage; false, with errno, if the
   filesystem is full. To be called before rows there are first touched; may be called again. */
bool process_reserve(struct gate *gate, size_t at, size_t length);

/* $LIVESHIFT_PAGES/<prefix><pid>, or false with errno set. */
bool process_path(char *path, const char *prefix, int pid); /* path: PATH_MAX bytes */

#endif
