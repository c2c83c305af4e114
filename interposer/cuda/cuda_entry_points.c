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

static const struct entry_point {
    const char *symbol, *exported;
    unsigned since;
    bool per_thread;
    void (*hook)(void);
    _Atomic(void *) *known; /* the real function behind the hook; NULL: not known yet */
} entry_points[] = {
#define X(symbol, since, per_thread, exported)                                                     \
    {#symbol, #exported, since, per_thread, exported, &known_##exported},
    LIVESHIFT_CUDA_ENTRY_POINTS(X)
#undef X
};

/* The row for what a resolver has found. If libcuda exports that function under a name that we
   know, its address decides. Otherwise the last row that fits decides: it is the latest version,
   and the variant with a default stream per thread if that is wanted. */
static const struct entry_point *find_entry_point(const char *symbol, unsigned version,
                                                  bool per_thread, void *function) {
    const struct entry_point *found = NULL;
    for (size_t i = 0; i < sizeof entry_points / sizeof *entry_points; i++) {
        const struct entry_point *entry_point = &entry_points[i];
        bool exactly = strcmp(entry_point->exported, symbol) == 0;
        if (!exactly && strcmp(entry_point->symbol, symbol) != 0)
            continue;
        if (function == (void *)entry_point->hook ||
            function == driver_function(entry_point->known, entry_point->exported))
            return entry_point;
        if (exactly || (entry_point->since <= version && entry_point->per_thread <= per_thread))
            found = entry_point;
    }
    return found;
}

void driver_substitute(const char *symbol, unsigned version, bool per_thread, void **function) {
    if (symbol == NULL || function == NULL || *function == NULL)
        return;
    const struct entry_point *entry_point =
        find_entry_point(symbol, version, per_thread, *function);
    void *hook = entry_point != NULL ? (void *)entry_point->hook : NULL;
    if (hook == NULL || *function == hook)
        return;
    /* If libcuda doesn't export it under that name, only the resolver knows it. */
    void *unknown = NULL;
    atomic_compare_exchange_strong(entry_point->known, &unknown, *function);
    *function = hook;
}
