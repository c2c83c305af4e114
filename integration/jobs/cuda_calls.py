# SPDX-License-Identifier: Apache-2.0
"""CUDA by ctypes for jobs that compute on the CPU: alike on the doubles and on a real GPU."""

from __future__ import annotations

import ctypes
from typing import Any
from uuid import UUID

import numpy as np
from numpy_net import Array

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # cudaMemcpyKind


class Library:
    """Functions as a program that is linked against the library gets them: a preloaded one first.

    ctypes asks the library itself, by dlsym, which would pass by whatever was preloaded.
    """

    def __init__(self, name: str) -> None:
        self._program, self._own = ctypes.CDLL(None), ctypes.CDLL(name)

    def code(self, name: str, *arguments: Any) -> int:
        """Call it and return its result."""
        function = getattr(self._program, name, None) or getattr(self._own, name)
        return int(function(*arguments))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            code = self.code(name, *arguments)
            if code != 0:
                raise RuntimeError(f"{name} returned {code}")

        return call


cuda = Library("libcudart.so.13")
driver = ctypes.CDLL("libcuda.so.1")


def stream() -> ctypes.c_void_p:
    """A new stream of the current device."""
    made = ctypes.c_void_p()
    cuda.cudaStreamCreate(ctypes.byref(made))
    return made


class Buffer:
    """Device memory of ``count`` floats with a host array beside it, which may be given."""

    def __init__(self, count: int, host: Array | None = None) -> None:
        self.host = np.zeros(count, np.float32) if host is None else host
        self.device = ctypes.c_void_p()
        self.size = ctypes.c_size_t(4 * count)
        self.count = ctypes.c_size_t(count)
        cuda.cudaMalloc(ctypes.byref(self.device), self.size)

    def up(self, stream: ctypes.c_void_p) -> None:
        cuda.cudaMemcpyAsync(self.device, self._beside, self.size, TO_DEVICE, stream)

    def down(self, stream: ctypes.c_void_p) -> None:
        cuda.cudaMemcpyAsync(self._beside, self.device, self.size, TO_HOST, stream)

    def copy_from(self, other: Buffer, stream: ctypes.c_void_p) -> None:
        """From one piece of device memory into another of the same size."""
        cuda.cudaMemcpyAsync(self.device, other.device, self.size, ON_DEVICE, stream)

    @property
    def _beside(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.host.ctypes.data)


def name(device: int) -> str:
    """What the driver calls a device; a simulated one says that it is."""
    text = ctypes.create_string_buffer(256)
    assert driver.cuDeviceGetName(text, 256, device) == 0
    return text.value.decode()


def uuid(device: int) -> str:
    """The UUID of the GPU that this device is now, as NVML writes it."""
    raw = ctypes.create_string_buffer(16)
    assert driver.cuDeviceGetUuid_v2(raw, device) == 0
    return f"GPU-{UUID(bytes=raw.raw)}"
