# SPDX-License-Identifier: Apache-2.0
"""The functions of the CUDA driver for memory: physical memory, mappings, pinned memory, copies.
The helper uses them, and so does the trial of the fast path.

Types and functions are those of CUDA 13.0's cuda.h, opened with dlopen. All arguments and results
are plain ints: a device is its ordinal, contexts, streams and events are addresses, memory is a
handle's number. No cffi object leaves this module. Every method raises CudaError.
"""

from __future__ import annotations

from typing import Any

import cffi

from ..errors import LiveshiftError
from .checkpoint import uuid_text
from .driver import check, open_library

_CDEF = """
typedef int CUresult;
typedef int CUdevice;
typedef uintptr_t CUcontext;
typedef uintptr_t CUstream;
typedef uintptr_t CUevent;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemHandle;
typedef struct {
    int type;
    int handle_types;
    int location_type;
    int location_id;
    void *win32;
    unsigned char compression;
    unsigned char gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
} CUmemProperties;
typedef struct { int location_type; int location_id; int flags; } CUmemAccess;

CUresult cuInit(unsigned int flags);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext *context);
CUresult cuCtxSynchronize(void);
CUresult cuMemGetInfo_v2(size_t *free, size_t *total);
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemProperties *properties, int how);
CUresult cuMemCreate(CUmemHandle *handle, size_t size, const CUmemProperties *properties,
                     unsigned long long flags);
CUresult cuMemRelease(CUmemHandle handle);
CUresult cuMemRetainAllocationHandle(CUmemHandle *handle, void *address);
CUresult cuMemExportToShareableHandle(void *descriptor, CUmemHandle handle, int type,
                                      unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemHandle *handle, void *descriptor, int type);
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment,
                             CUdeviceptr hint, unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t size);
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr address, size_t size);
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccess *access,
                        size_t count);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
CUresult cuMemsetD32_v2(CUdeviceptr address, unsigned int value, size_t count);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned int flags);
CUresult cuMemHostUnregister(void *address);
CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuEventCreate(CUevent *event, unsigned int flags);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventSynchronize(CUevent event);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                           CUcontext from_context, size_t bytes, CUstream stream);
"""

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_BLOCKING_SYNC, _NO_TIMING = 1, 2  # CU_EVENT_*
_RDMA_WITH_VMM = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED


class Cuda:
    """The opened driver library. Several threads may use it. A method that needs a context takes
    the one that the calling thread made current."""

    def __init__(self) -> None:
        """Raises LiveshiftError if there is no driver, CudaError if it can't start."""
        self._ffi = cffi.FFI()
        self._ffi.cdef(_CDEF)
        self._cu = open_library(self._ffi)
        self._call("cuInit", 0)

    def _call(self, name: str, *args: Any) -> None:
        try:
            function = getattr(self._cu, name)
        except AttributeError as error:
            raise LiveshiftError(f"this CUDA driver has no {name}") from error
        check(function(*args), name)

    def _got(self, kind: str, name: str, *args: Any) -> int:
        """Call the function; returns the number that it writes where its first argument points."""
        value = self._ffi.new(f"{kind} *")
        self._call(name, value, *args)
        return int(value[0])

    # ---- devices and contexts

    def uuids(self) -> list[str]:
        """The GPUs that this process sees, by ordinal, as "GPU-…"."""
        found = []
        for device in range(self._got("int", "cuDeviceGetCount")):
            raw = self._ffi.new("unsigned char[16]")
            self._call("cuDeviceGetUuid_v2", raw, device)
            found.append(uuid_text(bytes(raw)))
        return found

    def retain(self, device: int) -> int:
        """Retain the device's primary context, which the driver makes if there is none. The driver
        counts how often each context was retained."""
        return self._got("CUcontext", "cuDevicePrimaryCtxRetain", device)

    def let_go(self, device: int) -> None:
        """Undo one :meth:`retain`. The last call ends the context."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def push(self, context: int) -> None:
        """Make the context the calling thread's current one, until :meth:`pop`."""
        self._call("cuCtxPushCurrent_v2", context)

    def pop(self) -> None:
        """Undo the last :meth:`push`: the context before it is current again."""
        self._got("CUcontext", "cuCtxPopCurrent_v2")

    def free_and_total(self) -> tuple[int, int]:
        """Free and total bytes of memory of the current context's GPU."""
        free, total = self._ffi.new("size_t *"), self._ffi.new("size_t *")
        self._call("cuMemGetInfo_v2", free, total)
        return int(free[0]), int(total[0])

    # ---- physical memory

    def _properties(self, device: int) -> Any:
        # The fields must be set on a kept object: the driver reads it during the call only.
        return self._ffi.new(
            "CUmemProperties *",
            {
                "type": _PINNED,
                "handle_types": _DESCRIPTOR,
                "location_type": _DEVICE,
                "location_id": device,
                # The interposer's arena asks for this, too: NCCL may register memory with a NIC.
                "gpu_direct_rdma": self._got("int", "cuDeviceGetAttribute", _RDMA_WITH_VMM, device),
            },
        )

    def granularity(self, device: int) -> int:
        """Sizes of physical memory must be multiples of this many bytes."""
        return self._got("size_t", "cuMemGetAllocationGranularity", self._properties(device), 0)

    def create(self, device: int, size: int) -> int:
        """Make physical memory that can be exported; returns its handle."""
        return self._got("CUmemHandle", "cuMemCreate", size, self._properties(device), 0)

    def release(self, handle: int) -> None:
        """Release the handle. The driver frees the memory when its last handle, mapping and
        descriptor are gone."""
        self._call("cuMemRelease", handle)

    def handle_at(self, address: int) -> int:
        """A new handle of the memory that is mapped at the address."""
        pointer = self._ffi.cast("void *", address)
        return self._got("CUmemHandle", "cuMemRetainAllocationHandle", pointer)

    def descriptor_of(self, handle: int) -> int:
        """A new file descriptor for the memory; the caller closes it."""
        return self._got("int", "cuMemExportToShareableHandle", handle, _DESCRIPTOR, 0)

    def import_descriptor(self, descriptor: int) -> int:
        """A handle of the memory behind a descriptor. The caller keeps the descriptor. Needs a
        current context."""
        number = self._ffi.cast("void *", descriptor)
        return self._got("CUmemHandle", "cuMemImportFromShareableHandle", number, _DESCRIPTOR)

    def map(self, device: int, handle: int, size: int) -> int:
        """Reserve addresses and map the memory there, readable and writable for its device. Returns
        the address."""
        address = self.reserve(size)
        try:
            self.map_at(address, device, handle, size)
        except BaseException:
            self._call("cuMemAddressFree", address, size)
            raise
        return address

    def unmap(self, address: int, size: int) -> None:
        """Undo :meth:`map`: the addresses are free again."""
        self.unmap_at(address, size)
        self._call("cuMemAddressFree", address, size)

    def reserve(self, size: int) -> int:
        """Reserve addresses; returns the first."""
        return self._got("CUdeviceptr", "cuMemAddressReserve", size, 0, 0, 0)

    def map_at(self, address: int, device: int, handle: int, size: int) -> None:
        """Map memory at reserved addresses, readable and writable for its device."""
        self._call("cuMemMap", address, size, 0, handle, 0)
        try:
            access = self._ffi.new(
                "CUmemAccess *",
                {"location_type": _DEVICE, "location_id": device, "flags": _READ_WRITE},
            )
            self._call("cuMemSetAccess", address, size, access, 1)
        except BaseException:
            self._call("cuMemUnmap", address, size)
            raise

    def unmap_at(self, address: int, size: int) -> None:
        """Undo :meth:`map_at`: the addresses stay reserved."""
        self._call("cuMemUnmap", address, size)

    # ---- memory in the current context, and its content

    def allocate(self, size: int) -> int:
        """Allocate ordinary device memory; returns the address."""
        return self._got("CUdeviceptr", "cuMemAlloc_v2", size)

    def fill(self, address: int, value: int, size: int) -> None:
        """Write a 32-bit value into each word, and wait until that is done."""
        self._call("cuMemsetD32_v2", address, value, size // 4)
        self._call("cuCtxSynchronize")

    def read(self, address: int, size: int) -> bytes:
        """The bytes of device memory."""
        content = self._ffi.new("char[]", size)
        self._call("cuMemcpyDtoH_v2", content, address, size)
        return bytes(self._ffi.buffer(content))

    # ---- pinned host memory

    def pin(self, address: int, size: int) -> None:
        """Register host memory with the current context, for all contexts, so that copies to and
        from it run beside the caller. The registration ends with that context."""
        self._call("cuMemHostRegister_v2", self._ffi.cast("void *", address), size, _PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin`."""
        self._call("cuMemHostUnregister", self._ffi.cast("void *", address))

    # ---- streams, events, copies

    def stream(self) -> int:
        """Make a stream of the current context that does not wait for its default stream."""
        return self._got("CUstream", "cuStreamCreate", _NON_BLOCKING)

    def end_stream(self, stream: int) -> None:
        """Destroy the stream; work that was submitted still runs."""
        self._call("cuStreamDestroy_v2", stream)

    def wait_stream(self, stream: int) -> None:
        """Wait until all work that was submitted to the stream has run."""
        self._call("cuStreamSynchronize", stream)

    def event(self) -> int:
        """Make an event of the current context; a thread that waits for it sleeps and does not
        spin."""
        return self._got("CUevent", "cuEventCreate", _BLOCKING_SYNC | _NO_TIMING)

    def end_event(self, event: int) -> None:
        """Destroy the event."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Let the event happen when the stream has done all work submitted before."""
        self._call("cuEventRecord", event, stream)

    def wait_event(self, event: int) -> None:
        """Wait until the event has happened; raises the error of the work before it, if any."""
        self._call("cuEventSynchronize", event)

    def copy_out(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy from device to host memory. Returns before the copy is done if that is pinned."""
        self._call("cuMemcpyDtoHAsync_v2", self._ffi.cast("void *", to), source, size, stream)

    def copy_in(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy from host to device memory. Returns before the copy is done if that is pinned."""
        self._call("cuMemcpyHtoDAsync_v2", to, self._ffi.cast("void *", source), size, stream)

    def copy_across(
        self, to: int, to_context: int, source: int, source_context: int, size: int, stream: int
    ) -> None:
        """Copy from one GPU's memory to another's. If the GPUs can't reach each other, the driver
        copies through host memory."""
        self._call("cuMemcpyPeerAsync", to, to_context, source, source_context, size, stream)
