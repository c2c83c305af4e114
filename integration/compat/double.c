/* SPDX-License-Identifier: Apache-2.0 */
/* Stands for libtorch_cpu.so: every hooked function counts its calls. Wants nothing of libc, so
   that it can be loaded wherever the interposer can. */

#include "hooks/entry_points.h"

static unsigned long calls;

unsigned long double_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

#define X(kind, symbol, need)                                                                      \
    void symbol(void *options);                                                                    \
    void symbol(void *options) {                                                                   \
        (void)options;                                                                             \
        __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);                                           \
    }
LIVESHIFT_GLOO_ENTRY_POINTS(X)
