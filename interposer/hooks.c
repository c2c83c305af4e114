/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything that liveshift_interposer.so exports; process.c makes the page, gate.c decides
 * who passes, forward.c finds the functions behind the hooks.
 *
 * The law inside a hook:
 * - Hooks run on torch's own threads, several at once. No lock is held around the real function.
 * - Nothing is allocated, and beyond a process's first collective there is no system call
 *   while the gate is open.
 * - gloo reports errors by C++ exceptions, which unwind through these frames. Hence -fexceptions:
 *   no cleanup would run without it. A hook swallows nothing and adds nothing.
 * - No constructor: a process that never calls a collective (a shell, a DataLoader worker) pays for
 *   being loaded into and nothing else. LD_PRELOAD is left in the environment, because it is the
 *   children of a launcher such as torchrun that train.
 * - Fork and exec: page.h says what becomes of the page, process.c does it.
 */

#include "clocks.h"
#include "forward.h"

#include <stdatomic.h>
#include <stddef.h>

#define EXPORTED __attribute__((visibility("default")))

/* Increase when one of the three names below changes its meaning or goes away. Read by tests. */
#define LIVESHIFT_INTERPOSER_ABI 2

EXPORTED extern const int liveshift_interposer_abi;
const int liveshift_interposer_abi = LIVESHIFT_INTERPOSER_ABI;

/* Version of liveshift that this library was built from; static storage. */
EXPORTED const char *liveshift_interposer_version(void) { return LIVESHIFT_VERSION; }

/* "<need> <mangled name>" of each hook, NUL-separated, ended by an empty string. Read from the file
   by liveshift.interposer.page, to compare with what a torch library exports. */
EXPORTED extern const char liveshift_interposer_symbols[];
#define X(kind, symbol, need) #need " " #symbol "\0"
const char liveshift_interposer_symbols[] = LIVESHIFT_GLOO_ENTRY_POINTS(X);
#undef X

static void back(struct gate **gate) { unidentified_end(*gate); }

static inline void pass(enum kind kind, collective *real, void *options) {
    __attribute__((cleanup(back))) struct gate *gate = gate_here();
    atomic_fetch_add_explicit(&gate->page->counters[kind].started, 1, memory_order_relaxed);
    real(options);
}

#define HOOK(kind, symbol, need)                                                                   \
    EXPORTED void symbol(void *options);                                                           \
    void symbol(void *options) {                                                                   \
        static _Atomic(collective *) known;                                                        \
        collective *real = atomic_load_explicit(&known, memory_order_relaxed);                     \
        if (__builtin_expect(real == NULL, 0)) {                                                   \
            real = real_collective(#symbol);                                                       \
            atomic_store_explicit(&known, real, memory_order_relaxed);                             \
        }                                                                                          \
        pass(GLOO_##kind, real, options);                                                          \
    }

LIVESHIFT_GLOO_ENTRY_POINTS(HOOK)
