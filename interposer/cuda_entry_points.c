/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_entry_points.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

/* Of the hooks only the addresses count here, not what they take. */
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
    _Atomic(void *) *known; /* the real function behind the hook, once somebody knows it */
} ways[] = {
#define X(symbol, since, per_thread, exported)                                                     \
    {#symbol, #exported, since, per_thread, exported, &known_##exported},
    LIVESHIFT_CUDA_ENTRY_POINTS(X)
#undef X
};

/* The last row that fits is the latest version, and a thread's own default stream's variant. */
static const struct way *way_to(const char *symbol, unsigned version, bool per_thread) {
    const struct way *found = NULL;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        if (strcmp(ways[i].exported, symbol) == 0)
            return &ways[i];
        else if (strcmp(ways[i].symbol, symbol) == 0 && ways[i].since <= version &&
                 ways[i].per_thread <= per_thread)
            found = &ways[i];
    return found;
}

void driver_substitute(const char *symbol, unsigned version, bool per_thread, void **function) {
    if (symbol == NULL || function == NULL || *function == NULL)
        return;
    const struct way *way = way_to(symbol, version, per_thread);
    void *hook = way != NULL ? (void *)way->hook : NULL;
    if (hook == NULL || *function == hook)
        return;
    /* Where libcuda doesn't export it under that name, the resolver's word is all there is. */
    void *nobody = NULL;
    atomic_compare_exchange_strong(way->known, &nobody, *function);
    *function = hook;
}
