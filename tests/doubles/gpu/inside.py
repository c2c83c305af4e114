# SPDX-License-Identifier: Apache-2.0
"""A process that calls the simulated driver at a test's word: expressions in, values out.

Standard library only: it is started without site-packages, by cuda_process.py.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable


class Inside:
    """What an expression can use; sizes in bytes, functions give the driver's error codes."""

    def __init__(self, library: str) -> None:
        self.cu = ctypes.CDLL(library)
        self.kept: list[object] = []

    def init(self) -> int:
        context = ctypes.c_void_p()
        code = self.cu.cuInit(0)
        if code == 0:
            self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            code = self.cu.cuCtxSetCurrent(context)
        return int(code)

    def alloc(self, size: int, function: str = "cuMemAlloc_v2", *more: int) -> int:
        """The address, or minus the error."""
        pointer = ctypes.c_ulonglong()
        code = getattr(self.cu, function)(ctypes.byref(pointer), ctypes.c_size_t(size), *more)
        return -int(code) or pointer.value

    def put(self, address: int, data: bytes) -> int:
        return int(self.cu.cuMemcpyHtoD_v2(_u64(address), data, ctypes.c_size_t(len(data))))

    def get(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        assert self.cu.cuMemcpyDtoH_v2(data, _u64(address), ctypes.c_size_t(size)) == 0
        return data.raw

    def touch(self, address: int) -> bytes:
        return ctypes.string_at(address, 1)

    def free_and_total(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self.cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value, total.value

    def uuids(self) -> list[str]:
        count = ctypes.c_int()
        self.cu.cuDeviceGetCount(ctypes.byref(count))
        found = []
        for device in range(count.value):
            uuid = ctypes.create_string_buffer(16)
            assert self.cu.cuDeviceGetUuid_v2(uuid, device) == 0
            found.append(uuid.raw.hex())
        return found

    def bus(self, device: int = 0) -> str:
        text = ctypes.create_string_buffer(32)
        assert self.cu.cuDeviceGetPCIBusId(text, 32, device) == 0
        return text.value.decode()

    def number(self, function: str, *args: int) -> tuple[int, int]:
        """The code, and the int or long long that the function's last argument receives."""
        value = ctypes.c_ulonglong()
        code = getattr(self.cu, function)(*args, ctypes.byref(value))
        return int(code), value.value

    def version(self) -> int:
        value = ctypes.c_int()
        self.cu.cuDriverGetVersion(ctypes.byref(value))
        return value.value

    def resolve(self, name: str, version: int) -> int:
        """cuGetProcAddress's reason: 0 found, 1 not there, 2 only for a later version."""
        function, status = ctypes.c_void_p(), ctypes.c_int(-1)
        self.cu.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(function), version, _u64(0), ctypes.byref(status)
        )
        assert (status.value == 0) == bool(function.value)
        return status.value

    def lock(self, pid: int, timeout_ms: int = 0) -> int:
        args = (ctypes.c_uint * 16)(timeout_ms)
        return int(self.cu.cuCheckpointProcessLock(pid, args))

    def checkpoint(self, pid: int) -> int:
        return int(self.cu.cuCheckpointProcessCheckpoint(pid, None))

    def unlock(self, pid: int) -> int:
        return int(self.cu.cuCheckpointProcessUnlock(pid, None))

    def restore(self, pid: int, pairs: dict[str, str] | None = None) -> int:
        class Args(ctypes.Structure):
            _fields_ = (
                ("pairs", ctypes.c_char_p),
                ("count", ctypes.c_uint),
                ("r", ctypes.c_char * 52),
            )

        data = b"".join(bytes.fromhex(a + b) for a, b in (pairs or {}).items())
        args = Args(data if pairs else None, len(pairs or {}))
        return int(self.cu.cuCheckpointProcessRestore(pid, ctypes.byref(args)))

    def state(self, pid: int) -> int:
        code, value = self.number("cuCheckpointProcessGetState", pid)
        return -code or value

    def held(self, pid: int) -> int:
        code, value = self.number("simcuda_held_bytes", pid)
        return -code or value

    def slow(self, seconds: float) -> int:
        """A host function on the default stream that takes so long."""
        return self._submit(lambda: time.sleep(seconds))

    def until_there(self, path: str) -> int:
        """A host function on the default stream that ends once there is a file of that name."""

        def wait() -> None:
            while not os.path.exists(path):
                time.sleep(0.002)

        return self._submit(wait)

    def _submit(self, work: Callable[[], None]) -> int:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: work())
        self.kept.append(function)
        return int(self.cu.cuLaunchHostFunc(None, function, None))

    def physical(self, size: int, exportable: bool) -> int:
        """A VMM handle, or minus the error."""
        properties = (ctypes.c_int * 8)(1, int(exportable), 1, 0)
        return self.alloc(size, "cuMemCreate", properties, _u64(0))  # type: ignore[arg-type]

    def mapped(self, size: int, exportable: bool) -> int:
        """The address of fresh physical memory."""
        zero = _u64(0)
        handle = _u64(self.physical(size, exportable))
        at = _u64(self.alloc(size, "cuMemAddressReserve", ctypes.c_size_t(0), zero, zero))  # type: ignore[arg-type]
        assert self.cu.cuMemMap(at, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, zero) == 0
        access = (ctypes.c_int * 3)(1, 0, 3)
        assert self.cu.cuMemSetAccess(at, ctypes.c_size_t(size), access, ctypes.c_size_t(1)) == 0
        return at.value

    def export(self, handle: int) -> int:
        descriptor = ctypes.c_int()
        return int(
            self.cu.cuMemExportToShareableHandle(ctypes.byref(descriptor), _u64(handle), 1, _u64(0))
        )

    def ipc_handle(self, address: int) -> int:
        return int(self.cu.cuIpcGetMemHandle(ctypes.create_string_buffer(64), _u64(address)))

    def serve(self) -> None:
        names = {n: getattr(self, n) for n in dir(self) if not n.startswith("_")}
        names.update(os=os, ctypes=ctypes, threading=threading)
        for line in iter(sys.stdin.readline, ""):
            print(repr(eval(line, names)))
            sys.stdout.flush()


def _u64(value: int) -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(value)


if __name__ == "__main__":
    Inside(sys.argv[1]).serve()
