# SPDX-License-Identifier: Apache-2.0
"""The driver's functions by ctypes: what workers try is the driver, not liveshift."""

from __future__ import annotations

import ctypes
from typing import Any

U64, SIZE = ctypes.c_uint64, ctypes.c_size_t
TO_HOST, TO_DEVICE = 2, 1
"""cudaMemcpyKind."""


class CudaFailed(Exception):
    """A call gave this result."""

    def __init__(self, what: str, result: int) -> None:
        super().__init__(f"{what} gave {result}")
        self.result = result


class Library:
    """Functions of a library, checked; a preloaded one's come first, as for a linked program.

    ctypes asks the library itself, by dlsym, which would pass by whatever was preloaded.
    """

    def __init__(self, name: str) -> None:
        self._program, self._own = ctypes.CDLL(None), ctypes.CDLL(name)
        self._found: dict[str, Any] = {}  # looking up takes longer than some calls

    def code(self, name: str, *arguments: Any) -> int:
        """Call it and return its result."""
        function = self._found.get(name)
        if function is None:
            function = getattr(self._program, name, None) or getattr(self._own, name)
            self._found[name] = function
        return int(function(*arguments))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            if (result := self.code(name, *arguments)) != 0:
                raise CudaFailed(name, result)

        return call


class _Property(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", ctypes.c_int),
        ("device", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("place", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


class Driver:
    """libcuda with the primary context of device 0 current."""

    def __init__(self) -> None:
        self.cu = Library("libcuda.so.1")
        self.cu.cuInit(0)
        context = ctypes.c_void_p()
        self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self.cu.cuCtxSetCurrent(context)

    def reserve(self, size: int) -> int:
        at = U64()
        self.cu.cuMemAddressReserve(ctypes.byref(at), SIZE(size), SIZE(0), U64(0), U64(0))
        return at.value

    def physical(self, size: int, exportable: bool = False) -> int:
        """A handle of fresh physical memory of device 0."""
        wanted = _Property(type=1, handles=int(exportable), place=1, device=0)
        handle = U64()
        self.cu.cuMemCreate(ctypes.byref(handle), SIZE(size), ctypes.byref(wanted), U64(0))
        return handle.value

    def map(self, at: int, size: int, handle: int) -> None:
        self.cu.cuMemMap(U64(at), SIZE(size), SIZE(0), U64(handle), U64(0))
        access = _Access(place=1, device=0, flags=3)
        self.cu.cuMemSetAccess(U64(at), SIZE(size), ctypes.byref(access), SIZE(1))

    def unmap(self, at: int, size: int, handle: int) -> None:
        """The reservation of the address stays."""
        self.cu.cuMemUnmap(U64(at), SIZE(size))
        self.cu.cuMemRelease(U64(handle))

    def export(self, handle: int) -> int:
        """A file descriptor."""
        descriptor = ctypes.c_int()
        self.cu.cuMemExportToShareableHandle(ctypes.byref(descriptor), U64(handle), 1, U64(0))
        return descriptor.value

    def imported(self, descriptor: int) -> int:
        handle = U64()
        self.cu.cuMemImportFromShareableHandle(
            ctypes.byref(handle), ctypes.c_void_p(descriptor), ctypes.c_int(1)
        )
        return handle.value

    def fill(self, at: int, size: int, value: int) -> None:
        self.cu.cuMemsetD32_v2(U64(at), ctypes.c_uint(value), SIZE(size // 4))

    def word(self, at: int) -> int:
        value = ctypes.c_uint32()
        self.cu.cuMemcpyDtoH_v2(ctypes.byref(value), U64(at), SIZE(4))
        return value.value

    def wait(self) -> None:
        self.cu.cuCtxSynchronize()
