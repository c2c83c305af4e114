/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ncclConfig_t, versioned by its size. Only the caller's `size` bytes are read: a program built
 * against an older header passes a shorter struct (nccl#2347, a shim that copied all of its own
 * struct read stack garbage: "shrinkShare -2").
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static void take_names(ncclConfig_t *own) {
    own->netName = own->netName ? strdup(own->netName) : NULL;
    own->commName = own->commName ? strdup(own->commName) : NULL;
}

void config_free(ncclConfig_t *own) {
    free((char *)own->netName);
    free((char *)own->commName);
    own->netName = own->commName = NULL;
}

static bool flag(int value) { return value == NCCL_CONFIG_UNDEF_INT || value == 0 || value == 1; }

static bool positive(int value) { return value == NCCL_CONFIG_UNDEF_INT || value > 0; }

/* A config of one's own from the given one, else the parent's, else the defaults. */
ncclResult_t config_read(ncclConfig_t *own, const ncclConfig_t *given, const ncclConfig_t *parent) {
    *own = parent ? *parent : nccl_config(SIMNCCL_VERSION);
    if (given != NULL) {
        size_t size;
        *own = nccl_config(SIMNCCL_VERSION);
        memcpy(&size, given, sizeof size);
        if (size < offsetof(ncclConfig_t, blocking))
            return fail(ncclInvalidArgument, "ncclConfig_t has size %zu", size);
        if (size > own->size)
            size = own->size;
        memcpy(own, given, size);
        if (own->magic != NCCL_API_MAGIC) {
            own->netName = own->commName = NULL;
            return fail(ncclInvalidArgument,
                        "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
        }
    }
    own->size = nccl_config_size(SIMNCCL_VERSION);
    take_names(own);
    if (!flag(own->blocking) || !flag(own->splitShare) || !flag(own->shrinkShare) ||
        !positive(own->minCTAs) || !positive(own->maxCTAs) ||
        (own->cgaClusterSize != NCCL_CONFIG_UNDEF_INT &&
         (own->cgaClusterSize < 0 || own->cgaClusterSize > 8)) ||
        (own->minCTAs != NCCL_CONFIG_UNDEF_INT && own->maxCTAs != NCCL_CONFIG_UNDEF_INT &&
         own->minCTAs > own->maxCTAs)) {
        warn("Invalid config: blocking %d splitShare %d shrinkShare %d minCTAs %d maxCTAs %d "
             "cgaClusterSize %d",
             own->blocking, own->splitShare, own->shrinkShare, own->minCTAs, own->maxCTAs,
             own->cgaClusterSize);
        config_free(own);
        return ncclInvalidArgument;
    }
    if (own->blocking == NCCL_CONFIG_UNDEF_INT)
        own->blocking = 1;
    return ncclSuccess;
}
