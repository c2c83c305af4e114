/* SPDX-License-Identifier: Apache-2.0 */
#include "host_function.h"

#include "gate.h"

#include <stdlib.h>

struct call {
    CUhostFn function;
    void *data;
};

static void run(void *argument) {
    struct call *call = argument;
    gate_in_host_function(true);
    call->function(call->data);
    gate_in_host_function(false);
}

struct work host_function(CUhostFn function, void *data) {
    struct call *call = malloc(sizeof *call);
    *call = (struct call){function, data};
    return (struct work){run, call, free, CU_GRAPH_NODE_TYPE_HOST};
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *userData) {
    API_CALL();
    if (function == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct work work = host_function(function, userData);
    CUresult result = stream_submit(stream, work);
    if (result != CUDA_SUCCESS)
        free(work.argument);
    return result;
}
