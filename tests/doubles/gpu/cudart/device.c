/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

cudaError_t cudaGetDeviceCount(int *count) {
    if (count != NULL)
        *count = 0;
    FORWARD_BARE(cuDeviceGetCount(count));
}

cudaError_t cudaGetDevice(int *device) {
    int current;
    cudaError_t error = driver_load();
    if (error == cudaSuccess && device == NULL)
        error = cudaErrorInvalidValue;
    if (error != cudaSuccess)
        return noted(error);
    if (driver.cuCtxGetDevice(&current) == CUDA_SUCCESS)
        current_device = current;
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned int flags) {
    FORWARD_BARE(cuDevicePrimaryCtxSetFlags(current_device, flags));
}

cudaError_t cudaGetDeviceFlags(unsigned int *flags) {
    int active;
    FORWARD_BARE(cuDevicePrimaryCtxGetState(current_device, flags, &active));
}

cudaError_t cudaInitDevice(int device, unsigned int deviceFlags, unsigned int flags) {
    cudaError_t error = driver_load();
    if (error == cudaSuccess && flags != 0)
        error = (cudaError_t)driver.cuDevicePrimaryCtxSetFlags(device, deviceFlags);
    return noted(error);
}

cudaError_t cudaDeviceReset(void) { FORWARD(cuDevicePrimaryCtxReset(current_device)); }
cudaError_t cudaDeviceSynchronize(void) { FORWARD(cuCtxSynchronize()); }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    FORWARD_BARE(cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device));
}
cudaError_t cudaDeviceGetPCIBusId(char *busId, int length, int device) {
    FORWARD_BARE(cuDeviceGetPCIBusId(busId, length, device));
}
cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *busId) {
    FORWARD_BARE(cuDeviceGetByPCIBusId(device, busId));
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    FORWARD(cuCtxGetStreamPriorityRange(least, greatest));
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    FORWARD_BARE(cuDeviceCanAccessPeer(can, device, peer));
}
