/* SPDX-License-Identifier: Apache-2.0 */
/* Physical memory of the VMM API, with blocks_lock held throughout. */
#ifndef SIMCUDA_HANDLES_H
#define SIMCUDA_HANDLES_H

#include "device.h"

#include <stdbool.h>
#include <stddef.h>

#define GRANULARITY ((size_t)2 << 20)

struct handle {
    CUmemAllocationProp properties;
    size_t size;
    void *home;
    /* -1 unless it may be exported or was imported. */
    int memory;
    bool exported, imported;
    /* cuMemCreate and cuMemRetainAllocationHandle, and the maps. */
    unsigned int refs;
    void *saved;
    struct handle *next;
};

/* Some addresses are reserved and nothing is mapped there. */
bool reservations_bare(void);

/* The handle of that number, or NULL. */
struct handle *handle_find(CUmemGenericAllocationHandle number);
/* One reference less; the last takes the memory with it. */
void handle_drop(struct handle *handle);

/* Whether one was exported or imported. */
bool handles_shared(void);
/* For a checkpoint: content to the host and the memory given back; and the reverse. */
bool handles_save(void);
void handles_bring_back(void);

/* mprotect's bits for what any device may do: addresses are the host's here, and know none. */
int protection(const CUmemAccess_flags access[static MAX_DEVICES]);

#endif
