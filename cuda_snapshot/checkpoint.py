# SPDX-License-Identifier: Apache-2.0
"""The driver's functions that lock, checkpoint, restore and unlock another process.

The declarations are our own, after CUDA 13.0's cuda.h; no cffi object leaves this module. The
argument structures have 64 bytes in every version, and bytes that we don't set must be zero. A call
may take long; it releases Python's lock. Several threads may use the object.
"""

from __future__ import annotations

import enum
import uuid as uuids
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cffi

from ..errors import LiveshiftError
from .driver import LIBRARY, NEEDED, CudaError, check, in_words, open_library, version

SINCE = 12080
"""cudaTypedefs.h has the functions since this version: CUDA 12.8, driver 570."""

_CDEF = """
typedef int CUresult;
CUresult cuInit(unsigned int flags);
CUresult cuDriverGetVersion(int *version);
CUresult cuGetProcAddress_v2(
    const char *symbol, void **function, int version, uint64_t flags, int *status);

struct lock_args { unsigned int timeout_ms, reserved0; uint64_t reserved1[7]; };
struct empty_args { uint64_t reserved[8]; };
struct gpu_pair { unsigned char from[16], to[16]; };
struct restore_args {
    struct gpu_pair *pairs; unsigned int count; char reserved[44]; uint64_t reserved1;
};
"""

_FUNCTIONS = {
    "cuCheckpointProcessGetRestoreThreadId": "CUresult (*)(int, int *)",
    "cuCheckpointProcessGetState": "CUresult (*)(int, int *)",
    "cuCheckpointProcessLock": "CUresult (*)(int, struct lock_args *)",
    "cuCheckpointProcessCheckpoint": "CUresult (*)(int, struct empty_args *)",
    "cuCheckpointProcessRestore": "CUresult (*)(int, struct restore_args *)",
    "cuCheckpointProcessUnlock": "CUresult (*)(int, struct empty_args *)",
}
"""libcuda exports these functions since driver 570 (CUDA 12.8)."""


class CudaState(enum.IntEnum):
    """CUprocessState."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    """Uncorrectable: the process can only be killed."""


@dataclass(frozen=True)
class Driver:
    """What the host's CUDA driver offers. ``why_none`` is set exactly when there is no driver."""

    cuda: tuple[int, int] | None
    """The newest CUDA that the driver supports, such as (13, 0)."""
    missing: tuple[str, ...]
    """The checkpoint functions that the driver does not export."""
    why_none: str | None


def survey(library: str = LIBRARY) -> Driver:
    """Open the driver library and describe it. Needs no GPU, initialises none, raises nothing."""
    ffi = cffi.FFI()
    ffi.cdef(_CDEF + "".join(f"CUresult {name}();\n" for name in _FUNCTIONS))
    try:
        opened = open_library(ffi, library)
    except LiveshiftError as error:
        return Driver(None, (), str(error))
    try:
        cuda = version(ffi, opened)
    except (AttributeError, CudaError) as error:
        return Driver(None, (), f"{library} can't be used: {error}")
    missing = tuple(name for name in _FUNCTIONS if not hasattr(opened, name))
    return Driver(cuda, missing, None)


class CheckpointApi:
    """The functions of the driver library, initialised. Methods raise CudaError with the function's
    name and its result, unless their docstring says otherwise."""

    def __init__(self) -> None:
        """Opens the library and calls cuInit, which takes seconds on a large host without
        persistence mode. Raises LiveshiftError if there is no driver or it lacks a function."""
        self._ffi = cffi.FFI()
        self._ffi.cdef(_CDEF)
        for name in ("lock_args", "empty_args", "restore_args"):
            assert self._ffi.sizeof(f"struct {name}") == 64
        self._library = open_library(self._ffi)
        result = self._library.cuInit(0)
        if in_words(result):
            raise LiveshiftError(f"{CudaError('cuInit', result)}: {in_words(result)}")
        check(result, "cuInit")
        self.cuda = version(self._ffi, self._library)
        """The newest CUDA that the driver supports, such as (13, 0)."""
        self._functions = {name: self._resolve(name, kind) for name, kind in _FUNCTIONS.items()}

    def _resolve(self, name: str, kind: str) -> Any:
        """Look a function up by cuGetProcAddress (CUDA 12.0), which gives the variant of version
        SINCE. Raises LiveshiftError."""
        if hasattr(self._library, "cuGetProcAddress_v2"):
            found, status = self._ffi.new("void **"), self._ffi.new("int *")
            result = self._library.cuGetProcAddress_v2(name.encode(), found, SINCE, 0, status)
            if result == 0 and found[0] != self._ffi.NULL:
                return self._ffi.cast(kind, found[0])
        major, minor = self.cuda
        raise LiveshiftError(
            f"the CUDA driver (CUDA {major}.{minor}) has no {name}",
            hint="install driver 580 or newer: 570 was the first that can checkpoint",
        )

    @property
    def can_remap(self) -> bool:
        """Whether a process can be restored onto other GPUs than those of its checkpoint."""
        return self.cuda >= NEEDED

    def state(self, pid: int) -> CudaState:
        return CudaState(self._number("cuCheckpointProcessGetState", pid))

    def restore_thread(self, pid: int) -> int:
        """The thread of the process that does the driver's work there. It must be able to run."""
        return self._number("cuCheckpointProcessGetRestoreThreadId", pid)

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Bring the process from RUNNING to LOCKED when its submitted work has ended. If that takes
        longer than ``timeout_ms`` (0: no limit), the result is NOT_READY and it is RUNNING
        again."""
        args = self._ffi.new("struct lock_args *", {"timeout_ms": timeout_ms})
        self._call("cuCheckpointProcessLock", pid, args)

    def checkpoint(self, pid: int) -> None:
        """Bring the process from LOCKED to CHECKPOINTED: the driver copies its device memory into
        its own host memory."""
        self._call("cuCheckpointProcessCheckpoint", pid, self._ffi.new("struct empty_args *"))

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """Bring the process from CHECKPOINTED to LOCKED. ``pairs`` (old UUID, new UUID) name every
        GPU that the process could see, used or not; no pairs: the same GPUs. Raises LiveshiftError
        if this driver takes no map, or if the map holds text that is no UUID."""
        if pairs and not self.can_remap:
            major, minor = self.cuda
            raise LiveshiftError(
                f"the CUDA driver (CUDA {major}.{minor}) cannot restore onto other GPUs",
                hint="install driver 580 (CUDA 13.0) or newer",
            )
        listed = [(uuid_bytes(old), uuid_bytes(new)) for old, new in pairs]
        array = self._ffi.new("struct gpu_pair[]", listed)
        args = self._ffi.new("struct restore_args *")
        if listed:
            args.pairs, args.count = array, len(listed)
        self._call("cuCheckpointProcessRestore", pid, args)

    def unlock(self, pid: int) -> None:
        """Bring the process from LOCKED to RUNNING."""
        self._call("cuCheckpointProcessUnlock", pid, self._ffi.new("struct empty_args *"))

    def _number(self, name: str, pid: int) -> int:
        number = self._ffi.new("int *")
        self._call(name, pid, number)
        return int(number[0])

    def _call(self, name: str, pid: int, args: Any) -> None:
        check(self._functions[name](pid, args), name)


def uuid_bytes(text: str) -> bytes:
    """The 16 bytes of a UUID such as "GPU-51c0da00-…". Raises LiveshiftError if it is none."""
    try:
        if not text.startswith("GPU-"):
            raise ValueError(text)
        return uuids.UUID(text[4:]).bytes
    except ValueError:
        raise LiveshiftError(f"{text!r} is no UUID of a GPU") from None


def uuid_text(raw: bytes) -> str:
    """The text of a UUID as NVML writes it; the inverse of :func:`uuid_bytes`."""
    return f"GPU-{uuids.UUID(bytes=raw)}"
