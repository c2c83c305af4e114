/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the real function behind a hook. */
#ifndef LIVESHIFT_INTERPOSER_FORWARD_H
#define LIVESHIFT_INTERPOSER_FORWARD_H

#include <stdatomic.h>
#include <stddef.h>

/* Finds the real function of a mangled name in torch. If torch doesn't have it, this ends the
   process with one line on stderr: otherwise a collective would silently do nothing. */
void *real_function(const char *symbol);

/* The same for one hook: looks the real function up once, at the hook's first call. */
#define REAL(type, symbol)                                                                         \
    ({                                                                                             \
        static _Atomic(type *) known;                                                              \
        type *real = atomic_load_explicit(&known, memory_order_relaxed);                           \
        if (__builtin_expect(real == NULL, 0)) {                                                   \
            real = real_function(symbol);                                                          \
            atomic_store_explicit(&known, real, memory_order_relaxed);                             \
        }                                                                                          \
        real;                                                                                      \
    })

#endif
