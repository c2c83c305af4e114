/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events. */
#include "driver.h"

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    FORWARD(cuStreamCreateWithPriority(stream, flags, priority));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    FORWARD(cuStreamCreateWithPriority(stream, flags, 0));
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    FORWARD(cuStreamCreateWithPriority(stream, 0, 0));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { FORWARD(cuStreamDestroy(stream)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { FORWARD(cuStreamQuery(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { FORWARD(cuStreamSynchronize(stream)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    FORWARD(cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int *flags) {
    FORWARD(cuStreamGetFlags(stream, flags));
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    FORWARD(cuStreamGetPriority(stream, priority));
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    FORWARD(cuStreamGetId(stream, id));
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    CUcontext its, before = NULL;
    cudaError_t error = driver_ready();
    if (error == cudaSuccess)
        error = (cudaError_t)driver.cuStreamGetCtx(stream, &its);
    if (error != cudaSuccess)
        return noted(error);
    driver.cuCtxGetCurrent(&before);
    driver.cuCtxSetCurrent(its);
    error = (cudaError_t)driver.cuCtxGetDevice(device);
    driver.cuCtxSetCurrent(before);
    return noted(error);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *userData) {
    FORWARD(cuLaunchHostFunc(stream, function, userData));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    FORWARD(cuEventCreate(event, flags));
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { FORWARD(cuEventCreate(event, 0)); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { FORWARD(cuEventDestroy(event)); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    FORWARD(cuEventRecordWithFlags(event, stream, flags));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    FORWARD(cuEventRecordWithFlags(event, stream, 0));
}
cudaError_t cudaEventQuery(cudaEvent_t event) { FORWARD(cuEventQuery(event)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { FORWARD(cuEventSynchronize(event)); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    FORWARD(cuEventElapsedTime(milliseconds, start, end));
}
