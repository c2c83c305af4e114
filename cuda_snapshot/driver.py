# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver library: how it is opened, its version, its results (CUDA 13.0's cuda.h)."""

from __future__ import annotations

import enum
from typing import Any

from ..errors import LiveshiftError

LIBRARY = "libcuda.so.1"

NEEDED = (13, 0)
"""CUDA 13.0 (driver 580) is the first that can restore onto another GPU than the dump's; before,
the field of its map was reserved."""


class CUresult(enum.IntEnum):
    """The results of the functions that this package calls (cuda.h)."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEINITIALIZED = 4
    STUB_LIBRARY = 34
    CALL_REQUIRES_NEWER_DRIVER = 36
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_CONTEXT = 201
    MAP_FAILED = 205
    UNMAP_FAILED = 206
    ALREADY_MAPPED = 208
    NOT_MAPPED = 211
    ECC_UNCORRECTABLE = 214
    PEER_ACCESS_UNSUPPORTED = 217
    NVLINK_UNCORRECTABLE = 220
    OPERATING_SYSTEM = 304
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    PEER_ACCESS_ALREADY_ENABLED = 704
    CONTEXT_IS_DESTROYED = 709
    HOST_MEMORY_ALREADY_REGISTERED = 712
    HOST_MEMORY_NOT_REGISTERED = 713
    LAUNCH_FAILED = 719
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    SYSTEM_NOT_READY = 802
    SYSTEM_DRIVER_MISMATCH = 803
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    MPS_CONNECTION_FAILED = 805
    UNKNOWN = 999


_WORDS: dict[int, str] = {
    CUresult.STUB_LIBRARY: "the library is a stub for linking, no driver",
    CUresult.DEVICE_UNAVAILABLE: "another process has exclusive use of a GPU (compute mode)",
    CUresult.NO_DEVICE: "the driver sees no GPU",
    CUresult.OPERATING_SYSTEM: "the system refused a call of the driver; check /dev/nvidia*",
    CUresult.NOT_PERMITTED: "this user may not do that",
    CUresult.SYSTEM_NOT_READY: "the system is not ready; check that nvidia-fabricmanager runs",
    CUresult.SYSTEM_DRIVER_MISMATCH: (
        "the driver's library and its kernel module are of different versions: reload or reboot"
    ),
    CUresult.COMPAT_NOT_SUPPORTED_ON_DEVICE: "this GPU does not take a compatibility library",
    CUresult.MPS_CONNECTION_FAILED: "MPS is configured, and its server does not answer",
}


def in_words(result: int) -> str:
    """Explains to a person a result that can come when a driver is first used; "" for others."""
    return _WORDS.get(result, "")


class CudaError(LiveshiftError):
    """A call of the CUDA driver failed; ``result`` is its number, known to CUresult or not."""

    def __init__(self, what: str, result: int) -> None:
        name = CUresult(result).name if result in CUresult.__members__.values() else "?"
        super().__init__(f"{what} failed: CUDA_ERROR_{name} ({result})")
        self.result = result


def open_library(ffi: Any, library: str = LIBRARY) -> Any:
    """Open the driver library. Raises LiveshiftError if there is none."""
    try:
        return ffi.dlopen(library)
    except OSError as error:
        reason = str(error).partition(".  Additionally")[0]  # ctypes.util's guesses, no news
        raise LiveshiftError(f"no CUDA driver: {reason}") from None


def version(ffi: Any, opened: Any) -> tuple[int, int]:
    """The newest CUDA that the driver supports, such as (13, 0). Raises CudaError."""
    number = ffi.new("int *")
    check(opened.cuDriverGetVersion(number), "cuDriverGetVersion")
    return number[0] // 1000, number[0] % 1000 // 10


def check(result: int, what: str) -> None:
    """Raise CudaError, which names the call, unless ``result`` is success."""
    if result != CUresult.SUCCESS:
        raise CudaError(what, result)
