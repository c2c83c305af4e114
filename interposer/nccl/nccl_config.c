/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of ncclConfig_t. The caller's structure ends after `size` bytes, which may be more or less
   than the loaded NCCL knows. To read further was nccl#2347. */

#include "vcomm.h"

#include <stdlib.h>
#include <string.h>

/* What 2.26 knew. Every later NCCL accepts it. */
#define OLDEST_SIZE offsetof(struct nccl_config, commName)
#define OLDEST_VERSION 22600

static bool has_name(const struct nccl_config *config) {
    return config->size >= offsetof(struct nccl_config, commName) + sizeof config->commName;
}

struct nccl_config *config_copy(const void *given) {
    size_t size;
    if (given == NULL)
        return NULL;
    memcpy(&size, given, sizeof size);
    if (size < OLDEST_SIZE || size > 4096)
        return NULL; /* not a config: NCCL gets the caller's own, and says so */
    struct nccl_config *copy = calloc(1, size < sizeof *copy ? sizeof *copy : size);
    if (copy == NULL)
        return NULL;
    memcpy(copy, given, size);
    if (copy->netName != NULL)
        copy->netName = strdup(copy->netName);
    if (has_name(copy) && copy->commName != NULL)
        copy->commName = strdup(copy->commName);
    return copy;
}

struct nccl_config *config_or_default(const struct nccl_config *config) {
    if (config != NULL)
        return config_copy(config);
    const int unset = NCCL_CONFIG_UNDEF_INT;
    struct nccl_config oldest = {
        .size = OLDEST_SIZE,
        .magic = NCCL_CONFIG_MAGIC,
        .version = OLDEST_VERSION,
        .blocking = unset,
        .cgaClusterSize = unset,
        .minCTAs = unset,
        .maxCTAs = unset,
        .splitShare = unset,
        .trafficClass = unset,
    };
    return config_copy(&oldest);
}

bool config_blocks(const struct nccl_config *config) {
    return config == NULL || config->blocking != 0;
}

const char *config_name(const struct nccl_config *config) {
    return config != NULL && has_name(config) ? config->commName : NULL;
}

void config_free(struct nccl_config *config) {
    if (config == NULL)
        return;
    free((char *)config->netName);
    if (has_name(config))
        free((char *)config->commName);
    free(config);
}
