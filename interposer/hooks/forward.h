/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of torch's C++ functions, and finding the real function behind one. */
#ifndef LIVESHIFT_INTERPOSER_FORWARD_H
#define LIVESHIFT_INTERPOSER_FORWARD_H

#include "entry_points.h"
#include "exported.h"

#include <stdatomic.h>
#include <stddef.h>

/* Finds the real function of a mangled name in torch. If torch doesn't have it, this ends the
   process with one line on stderr: otherwise a collective would silently do nothing. */
void *real_function(const char *symbol);

/* For the lists of entry_points.h: declares hook_<name>, which has the C++ function's mangled name
   in the library. Its type must be declared before, as <name>_hook. */
#define DECLARE_HOOK(name, symbol, need)                                                           \
    static const char symbol_of_##name[] = #symbol;                                                \
    EXPORTED name##_hook hook_##name __asm__(#symbol);

/* real_function for such a hook: looks it up once, at the hook's first call. */
#define REAL(name)                                                                                 \
    ({                                                                                             \
        static _Atomic(name##_hook *) known;                                                       \
        name##_hook *real = atomic_load_explicit(&known, memory_order_relaxed);                    \
        if (__builtin_expect(real == NULL, 0)) {                                                   \
            real = real_function(symbol_of_##name);                                                \
            atomic_store_explicit(&known, real, memory_order_relaxed);                             \
        }                                                                                          \
        real;                                                                                      \
    })

#endif
