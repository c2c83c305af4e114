/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_entry_points.h"

#include "cuda_real.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

/* Only the addresses of the hooks count here, not their parameters. */
#define X(symbol, since, per_thread, exported)                                                     \
    void exported(void);                                                                           \
    extern _Atomic(void *) known_##exported;
LIVESHIFT_CUDA_ENTRY_POINTS(X)
#undef X

static const struct way {
    const char *symbol, *exported;
    unsigned since;
    bool per_thread;
    void (*hook)(void);
    _Atomic(void *) *known; /* the real function behind the hook; NULL: not known yet */
} ways[] = {
#define X(symbol, since, per_thread, exported)                                                     \
    {#symbol, #exported, since, per_thread, exported, &known_##exported},
    LIVESHIFT_CUDA_ENTRY_POINTS(X)
#undef X
};

/* The row for what a resolver has found. If libcuda exports that function under a name that we
   know, its address decides. Otherwise the last row that fits decides: it is the latest version,
   and the variant with a default stream per thread if that is wanted. */
static const struct way *way_to(const char *symbol, unsigned version, bool per_thread,
                                void *function) {
    const struct way *found = NULL;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const struct way *way = &ways[i];
        bool exactly = strcmp(way->exported, symbol) == 0;
        if (!exactly && strcmp(way->symbol, symbol) != 0)
            continue;
        if (function == (void *)way->hook || function == driver_function(way->known, way->exported))
            return way;
        if (exactly || (way->since <= version && way->per_thread <= per_thread))
            found = way;
    }
    return found;
}

void driver_substitute(const char *symbol, unsigned version, bool per_thread, void **function) {
    if (symbol == NULL || function == NULL || *function == NULL)
        return;
    const struct way *way = way_to(symbol, version, per_thread, *function);
    void *hook = way != NULL ? (void *)way->hook : NULL;
    if (hook == NULL || *function == hook)
        return;
    /* If libcuda doesn't export it under that name, only the resolver knows it. */
    void *nobody = NULL;
    atomic_compare_exchange_strong(way->known, &nobody, *function);
    *function = hook;
}
