# SPDX-License-Identifier: Apache-2.0
"""The few functions of CUDA's virtual memory management that the trial calls; see cuda.h."""

from __future__ import annotations

from typing import Any

import cffi

from ...errors import LiveshiftError
from ..checkpoint import uuid_text
from ..driver import LIBRARY, check

_CDEF = """
typedef int CUresult;
struct properties {
    int type, handle_types, location_type, device;
    void *win32; unsigned char flags[8];
};
struct access { int location_type, device, flags; };
CUresult cuInit(unsigned int flags);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device);
CUresult cuDevicePrimaryCtxRetain(void **context, int device);
CUresult cuCtxSetCurrent(void *context);
CUresult cuCtxSynchronize(void);
CUresult cuMemAlloc_v2(uint64_t *address, size_t size);
CUresult cuMemsetD32_v2(uint64_t address, unsigned int value, size_t count);
CUresult cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size);
CUresult cuMemGetAllocationGranularity(size_t *size, struct properties *, int which);
CUresult cuMemCreate(uint64_t *handle, size_t size, struct properties *, uint64_t flags);
CUresult cuMemRelease(uint64_t handle);
CUresult cuMemAddressReserve(
    uint64_t *address, size_t size, size_t alignment, uint64_t hint, uint64_t flags);
CUresult cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags);
CUresult cuMemUnmap(uint64_t address, size_t size);
CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *address);
CUresult cuMemSetAccess(uint64_t address, size_t size, struct access *, size_t count);
CUresult cuMemExportToShareableHandle(void *to, uint64_t handle, int type, uint64_t flags);
CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *from, int type);
"""
_PINNED = _DEVICE = _DESCRIPTOR = 1
_READ_WRITE = 3


class FastPathMemory:
    """Memory of one GPU in this process, for the thread that made the object and for threads that
    called :meth:`enter`. Methods raise CudaError."""

    def __init__(self, uuid: str) -> None:
        """Makes a context on that GPU. Raises LiveshiftError if there is no such GPU."""
        self._ffi = cffi.FFI()
        self._ffi.cdef(_CDEF)
        self._library = self._ffi.dlopen(LIBRARY)
        self._call("cuInit", 0)
        self._device = self._find(uuid)
        context = self._ffi.new("void **")
        self._call("cuDevicePrimaryCtxRetain", context, self._device)
        self._context = context[0]
        self.enter()
        self._properties = self._ffi.new(
            "struct properties *", (_PINNED, _DESCRIPTOR, _DEVICE, self._device)
        )
        self._access = self._ffi.new("struct access *", (_DEVICE, self._device, _READ_WRITE))
        self.size = self._number("size_t", "cuMemGetAllocationGranularity", self._properties, 0)

    def _find(self, uuid: str) -> int:
        raw = self._ffi.new("unsigned char[16]")
        for device in range(self._number("int", "cuDeviceGetCount")):
            self._call("cuDeviceGetUuid_v2", raw, device)
            if uuid_text(bytes(raw)) == uuid:
                return device
        raise LiveshiftError(f"CUDA sees no GPU {uuid}")

    def enter(self) -> None:
        """Make the context current for the calling thread, too."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self) -> int:
        """Allocate ``size`` bytes of ordinary device memory; returns the address."""
        return self._number("uint64_t", "cuMemAlloc_v2", self.size)

    def create(self) -> int:
        """Make ``size`` bytes of physical memory that can be exported; returns the handle."""
        return self._number("uint64_t", "cuMemCreate", self.size, self._properties, 0)

    def reserve(self) -> int:
        return self._number("uint64_t", "cuMemAddressReserve", self.size, 0, 0, 0)

    def map(self, address: int, handle: int) -> None:
        self._call("cuMemMap", address, self.size, 0, handle, 0)
        self._call("cuMemSetAccess", address, self.size, self._access, 1)

    def unmap(self, address: int, handle: int) -> None:
        """Unmap the memory and release its handle; the address stays reserved."""
        self._call("cuMemUnmap", address, self.size)
        self._call("cuMemRelease", handle)

    def release(self, handle: int) -> None:
        """Release a handle; memory that is mapped stays."""
        self._call("cuMemRelease", handle)

    def retained(self, address: int) -> int:
        """A new handle of the memory that is mapped at the address."""
        pointer = self._ffi.cast("void *", address)
        return self._number("uint64_t", "cuMemRetainAllocationHandle", pointer)

    def exported(self, handle: int) -> int:
        """A descriptor of the memory; the caller must close it."""
        return self._number("int", "cuMemExportToShareableHandle", handle, _DESCRIPTOR, 0)

    def imported(self, descriptor: int) -> int:
        """A handle of the memory behind a descriptor, which the caller may close then."""
        pointer = self._ffi.cast("void *", descriptor)
        return self._number("uint64_t", "cuMemImportFromShareableHandle", pointer, _DESCRIPTOR)

    def fill(self, address: int, value: int) -> None:
        self._call("cuMemsetD32_v2", address, value, self.size // 4)
        self._call("cuCtxSynchronize")

    def holds(self, address: int, value: int) -> bool:
        """Whether every 32-bit word of the memory at the address has the value."""
        words = self._ffi.new("uint32_t[]", self.size // 4)
        self._call("cuMemcpyDtoH_v2", words, address, self.size)
        return bytes(self._ffi.buffer(words)) == value.to_bytes(4, "little") * (self.size // 4)

    def _number(self, kind: str, name: str, *args: Any) -> int:
        """Call a function; returns the number that it writes where its first argument points."""
        number = self._ffi.new(f"{kind} *")
        self._call(name, number, *args)
        return int(number[0])

    def _call(self, name: str, *args: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise LiveshiftError(f"the CUDA driver has no {name}")
        check(function(*args), name)
