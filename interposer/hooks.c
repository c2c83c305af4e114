/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything that liveshift_interposer.so exports; counting.c counts, forward.c finds the functions
 * behind the hooks.
 *
 * The law inside a hook:
 * - Hooks run on torch's own threads, several at once. No lock is held around the real function.
 * - Nothing is allocated, and beyond a process's first collective there is no system call: the
 *   clock is read through the vDSO.
 * - gloo reports errors by C++ exceptions, which unwind through these frames. Hence -fexceptions:
 *   no cleanup would run without it. A hook swallows nothing and adds nothing.
 * - No constructor: a process that never calls a collective (a shell, a DataLoader worker) pays for
 *   being loaded into and nothing else. LD_PRELOAD is left in the environment, because it is the
 *   children of a launcher such as torchrun that train.
 * - Fork and exec: page.h says what becomes of the page, counting.c does it.
 */

#include "counting.h"
#include "forward.h"

#include <stdatomic.h>
#include <stddef.h>

#define EXPORTED __attribute__((visibility("default")))

/* Increase when one of the three names below changes its meaning or goes away. Read by tests. */
#define LIVESHIFT_INTERPOSER_ABI 1

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

static inline void pass(enum collective_kind kind, collective *real, void *options) {
    __attribute__((cleanup(call_finished))) struct call call = call_started(kind);
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
