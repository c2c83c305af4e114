/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* CUDA 13.0 and 12.8: what these libraries say they are, and the newest entry points they ask for. */
#define RUNTIME_VERSION (CUDART_MAJOR == 13 ? 13000 : 12080)
#define MAX_DEVICES 64

struct driver driver;
_Thread_local int current_device;

static cudaError_t load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        return cudaErrorInsufficientDriver;
    driver.resolve = (__typeof__(driver.resolve))dlsym(library, "cuGetProcAddress_v2");
    if (driver.resolve == NULL)
        return cudaErrorInsufficientDriver;
#define X(name, suffix, version)                                                                   \
    if (driver.resolve(#name, (void **)&driver.name, version, 0, NULL) != CUDA_SUCCESS)            \
        return cudaErrorInsufficientDriver;
    DRIVER_FUNCTIONS(X)
#undef X
    return (cudaError_t)driver.cuInit(0);
}

cudaError_t driver_load(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static bool tried;
    static cudaError_t result;
    pthread_mutex_lock(&lock);
    if (!tried)
        result = load();
    tried = true;
    cudaError_t now = result;
    pthread_mutex_unlock(&lock);
    return now;
}

/* The runtime retains each primary context once and for ever. */
static cudaError_t primary(int device, CUcontext *context) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static CUcontext contexts[MAX_DEVICES];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (contexts[device] == NULL)
        result = driver.cuDevicePrimaryCtxRetain(&contexts[device], device);
    *context = contexts[device];
    pthread_mutex_unlock(&lock);
    return (cudaError_t)result;
}

/* A context that the program set with the driver API stays current, as with the real one. */
cudaError_t driver_ready(void) {
    CUcontext context;
    int device;
    cudaError_t error = driver_load();
    if (error != cudaSuccess)
        return error;
    if (driver.cuCtxGetDevice(&device) == CUDA_SUCCESS) {
        current_device = device;
        return cudaSuccess;
    }
    error = primary(current_device, &context);
    return error == cudaSuccess ? (cudaError_t)driver.cuCtxSetCurrent(context) : error;
}

/* ---- entry points ----------------------------------------------------------------------------- */

cudaError_t cudaDriverGetVersion(int *version) {
    if (driver_load() == cudaErrorInsufficientDriver) {
        *version = 0;
        return cudaSuccess;
    }
    return noted((cudaError_t)driver.cuDriverGetVersion(version));
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    if (version == NULL)
        return noted(cudaErrorInvalidValue);
    *version = RUNTIME_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function,
                                             unsigned int version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
    cudaError_t error = driver_load();
    if (error != cudaSuccess)
        return noted(error);
    CUresult result = driver.resolve(symbol, function, (int)version, flags, &found);
    if (status != NULL)
        *status = (enum cudaDriverEntryPointQueryResult)found;
    /* With a place for the status, not finding is no error. */
    return result == CUDA_ERROR_NOT_FOUND && status ? cudaSuccess : noted((cudaError_t)result);
}

cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, RUNTIME_VERSION, flags, status);
}

/* What programs call that were compiled for per-thread default streams: the same here. */
cudaError_t cudaGetDriverEntryPoint_ptsz(const char *symbol, void **function,
                                         unsigned long long flags,
                                         enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPoint(symbol, function, flags, status);
}

cudaError_t cudaGetDriverEntryPointByVersion_ptsz(const char *symbol, void **function,
                                                  unsigned int version, unsigned long long flags,
                                                  enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, version, flags, status);
}

cudaError_t cudaSetDevice(int device) {
    int count;
    CUcontext context = NULL;
    cudaError_t error = driver_load();
    if (error == cudaSuccess)
        error = (cudaError_t)driver.cuDeviceGetCount(&count);
    if (error == cudaSuccess && (device < 0 || device >= count))
        error = cudaErrorInvalidDevice;
    if (error == cudaSuccess)
        error = primary(device, &context);
    if (error == cudaSuccess)
        error = (cudaError_t)driver.cuCtxSetCurrent(context);
    if (error == cudaSuccess)
        current_device = device;
    return noted(error);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
    CUcontext context;
    int can = 0;
    cudaError_t error = driver_ready();
    if (error == cudaSuccess)
        error = (cudaError_t)driver.cuDeviceCanAccessPeer(&can, current_device, peer);
    if (error == cudaSuccess && !can)
        error = cudaErrorInvalidDevice;
    if (error == cudaSuccess)
        error = primary(peer, &context);
    if (error == cudaSuccess)
        error = (cudaError_t)driver.cuCtxEnablePeerAccess(context, flags);
    return noted(error);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    CUcontext context;
    cudaError_t error = driver_ready();
    if (error == cudaSuccess)
        error = primary(peer, &context);
    if (error == cudaSuccess)
        error = (cudaError_t)driver.cuCtxDisablePeerAccess(context);
    return noted(error);
}
