/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters by name (2.30) and encryption (2.32). Only parameters that this double reads exist. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#if SIMNCCL_VERSION >= 23004
struct ncclParamHandle {
    const char *key;
    const char *otherwise;
};

static struct ncclParamHandle parameters[] = {
    {"NCCL_DEBUG", ""},         {"NCCL_HOSTID", ""},
    {"NCCL_RAS_ENABLE", "1"},   {"NCCL_MULTI_RANK_GPU_ENABLE", "0"},
    {"NCCL_SOCKET_IFNAME", ""},
};
#define PARAMETERS ((int)(sizeof parameters / sizeof *parameters))

static bool known(ncclParamHandle_t handle) {
    return handle >= parameters && handle < parameters + PARAMETERS;
}

static const char *text(ncclParamHandle_t handle) {
    const char *set = getenv(handle->key);
    return set != NULL ? set : handle->otherwise;
}

API(ncclResult_t, ncclParamBind, (ncclParamHandle_t * handle, const char *key)) {
    if (handle == NULL || key == NULL)
        return ncclInvalidArgument;
    for (int one = 0; one < PARAMETERS; one++)
        if (strcmp(parameters[one].key, key) == 0) {
            *handle = &parameters[one];
            return ncclSuccess;
        }
    return ncclInvalidArgument;
}

#define GET(suffix, type, parse)                                                                   \
    API(ncclResult_t, ncclParamGet##suffix, (ncclParamHandle_t handle, type * value)) {            \
        if (!known(handle) || value == NULL)                                                       \
            return ncclInvalidArgument;                                                            \
        *value = (type)parse(text(handle), NULL, 0);                                               \
        return ncclSuccess;                                                                        \
    }
GET(I8, int8_t, strtoll)
GET(I16, int16_t, strtoll)
GET(I32, int32_t, strtoll)
GET(I64, int64_t, strtoll)
GET(U8, uint8_t, strtoull)
GET(U16, uint16_t, strtoull)
GET(U32, uint32_t, strtoull)
GET(U64, uint64_t, strtoull)

API(ncclResult_t, ncclParamGetStr, (ncclParamHandle_t handle, const char **value)) {
    if (!known(handle) || value == NULL)
        return ncclInvalidArgument;
    *value = text(handle);
    return ncclSuccess;
}

API(ncclResult_t, ncclParamGet,
    (ncclParamHandle_t handle, void *value, int capacity, int *length)) {
    if (!known(handle) || value == NULL || length == NULL)
        return ncclInvalidArgument;
    *length = (int)strlen(text(handle)) + 1;
    if (capacity < *length)
        return ncclInvalidArgument;
    memcpy(value, text(handle), (size_t)*length);
    return ncclSuccess;
}

API(ncclResult_t, ncclParamGetParameter, (const char *key, const char **value, int *length)) {
    ncclParamHandle_t handle;
    RETURN_UNLESS_SUCCESS(pncclParamBind(&handle, key));
    RETURN_UNLESS_SUCCESS(pncclParamGetStr(handle, value));
    if (length != NULL)
        *length = (int)strlen(*value);
    return ncclSuccess;
}

API(ncclResult_t, ncclParamGetAllParameterKeys, (const char ***table, int *length)) {
    static _Thread_local const char *keys[PARAMETERS];
    if (table == NULL || length == NULL)
        return ncclInvalidArgument;
    for (int one = 0; one < PARAMETERS; one++)
        keys[one] = parameters[one].key;
    *table = keys;
    *length = PARAMETERS;
    return ncclSuccess;
}

API(void, ncclParamDumpAll, (void)) {
    for (int one = 0; one < PARAMETERS; one++)
        fprintf(stderr, "%s=%s\n", parameters[one].key, text(&parameters[one]));
}
#endif

#if SIMNCCL_VERSION >= 23203
API(ncclResult_t, ncclSetEncryption, (const ncclEncryptionConfig_t *config)) {
    if (config == NULL || config->size < sizeof *config || config->magic != NCCL_API_MAGIC)
        return ncclInvalidArgument;
    return config->mode == 0 ? ncclSuccess : fail(ncclInvalidUsage, "encryption is not simulated");
}
#endif
