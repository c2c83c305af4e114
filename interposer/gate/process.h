/* SPDX-License-Identifier: Apache-2.0 */
/* This process's one interposer page and one gate. */
#ifndef LIVESHIFT_INTERPOSER_PROCESS_H
#define LIVESHIFT_INTERPOSER_PROCESS_H

#include "gate.h"

#include <stddef.h>

extern _Atomic(struct gate *) process_gate; /* NULL until first needed, and again after a fork */
extern __thread int32_t process_own_tid __attribute__((tls_model("initial-exec")));

struct gate *process_init(void);
int32_t process_tid(void);

/* This process's gate; makes the page first if the process has none. Never fails: if no page can be
   made in $LIVESHIFT_PAGES, the process gets a private one that no agent sees, and its gate stays
   open. */
static inline struct gate *current_gate(void) {
    struct gate *gate = atomic_load_explicit(&process_gate, memory_order_acquire);
    return __builtin_expect(gate != NULL, 1) ? gate : process_init();
}

/* gettid() without its system call. */
static inline int32_t current_tid(void) {
    return __builtin_expect(process_own_tid != 0, 1) ? process_own_tid : process_tid();
}

/* How many forks lie between the first process and this one. A value that was stored under another
   number comes from a parent. */
unsigned process_generation(void);

/*
 * Registers fork handlers when the library is loaded, and not when they are first needed. Otherwise
 * another thread could be in the middle of a fork at that moment: its child would inherit the state
 * but run no handler (glibc 2.36 and later). Before a fork, handlers of a higher order run earlier.
 * So an inner lock, which is taken while another lock is held, needs the lower order.
 */
enum { FORK_LEDGER = 201, FORK_PROCESS, FORK_ROWS, FORK_OPERATIONS, FORK_CONTEXTS };
#define AT_FORK(order, prepare, parent, child)                                                     \
    static __attribute__((constructor(order))) void handle_fork(void) {                            \
        pthread_atfork(prepare, parent, child);                                                    \
    }

/* The same for state under a mutex: the mutex is held across the fork, so that the child never
   inherits it from a thread that it doesn't have. `in_child` runs in the child, under the mutex. */
#define AT_FORK_LOCKED(order, mutex, in_child)                                                     \
    static void before_fork(void) { pthread_mutex_lock(&mutex); }                                  \
    static void after_fork_in_parent(void) { pthread_mutex_unlock(&mutex); }                       \
    static void after_fork_in_child(void) {                                                        \
        in_child();                                                                                \
        pthread_mutex_unlock(&mutex);                                                              \
    }                                                                                              \
    AT_FORK(order, before_fork, after_fork_in_parent, after_fork_in_child)

/* Makes sure that a table's next row has storage, before it is first touched. The table lies `at`
   bytes into the page and has `most` rows of `size` bytes; `used` of them have been used. Returns
   NULL, or why there is no such row: the table or the filesystem is full. */
const char *process_next_row(struct gate *gate, uint32_t used, uint32_t most, size_t at,
                             size_t size);

/* Writes to stderr, once for each flag, that the page has no room for another `what`, why, and what
   follows for this process. */
void process_warn_full(atomic_flag *warned, const char *what, const char *why,
                       const char *consequence);

/* Writes $LIVESHIFT_PAGES/<prefix><pid> into `path`; false, with errno set, if it cannot. */
bool process_path(char *path, const char *prefix, int pid); /* path: PATH_MAX bytes */

#endif
