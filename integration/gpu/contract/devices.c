/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and contexts. */
#include "contract.h"

#include <sys/wait.h>

int main(void) {
    int count, device, attribute, active;
    unsigned int flags;
    size_t total, free;
    char bus[32], name[128];
    CUuuid uuid;
    CUcontext context, current;
    say_where();
    WORKS(cudaGetDeviceCount(&count));
    MUST(count >= 1);
    WORKS(cuDeviceGetName(name, sizeof name, 0));
    WORKS(cuDeviceGetUuid_v2(&uuid, 0));
    WORKS(cuDeviceTotalMem_v2(&total, 0));
    WORKS(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
    WORKS(cudaDeviceGetByPCIBusId(&device, bus));
    MUST(device == 0);
    WORKS(cudaDeviceGetAttribute(&attribute, cudaDevAttrComputeCapabilityMajor, 0));
    MUST(attribute >= 5);
    GIVES(CUDA_ERROR_INVALID_DEVICE, cuDeviceTotalMem_v2(&total, count));
    GIVES(cudaErrorInvalidDevice, cudaSetDevice(count));
    GIVES(cudaErrorInvalidDevice, cudaGetLastError());
    ok("a device has a name, a UUID, a size and a place");

    WORKS(cuDevicePrimaryCtxGetState(0, &flags, &active));
    MUST(!active);
    WORKS(cuCtxGetCurrent(&current));
    MUST(current == NULL);
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cuMemGetInfo_v2(&free, &total));
    WORKS(cudaMemGetInfo(&free, &total));
    WORKS(cuDevicePrimaryCtxGetState(0, &flags, &active));
    MUST(active);
    WORKS(cuCtxGetCurrent(&current));
    WORKS(cuDevicePrimaryCtxRetain(&context, 0));
    MUST(current == context);
    WORKS(cuCtxGetDevice(&device));
    MUST(device == 0);
    WORKS(cuDevicePrimaryCtxRelease_v2(0));
    ok("the runtime works in the primary context");

    pid_t child = fork();
    if (child == 0)
        _exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
                      cudaMemGetInfo(&free, &total) != cudaSuccess
                  ? 0
                  : 1);
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    ok("a child forked after cuInit can't use CUDA");
    return 0;
}
