# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU, in pieces of the smallest size, which the trial makes and hands over."""

from __future__ import annotations

from ...errors import LiveshiftError
from ..cuda import Cuda


class FastPathMemory:
    """Memory of one GPU in this process, for the thread that made the object and for threads that
    called :meth:`enter`. Methods raise CudaError."""

    def __init__(self, uuid: str) -> None:
        """Makes a context on that GPU. Raises LiveshiftError if there is no such GPU."""
        self.cuda = Cuda()
        gpus = self.cuda.uuids()
        if uuid not in gpus:
            raise LiveshiftError(f"CUDA sees no GPU {uuid}")
        self._device = gpus.index(uuid)
        self._context = self.cuda.retain(self._device)
        self.enter()
        self.size = self.cuda.granularity(self._device)

    def enter(self) -> None:
        """Make the context current for the calling thread, too."""
        self.cuda.push(self._context)

    def allocate(self) -> int:
        """Allocate ``size`` bytes of ordinary device memory; returns the address."""
        return self.cuda.allocate(self.size)

    def create(self) -> int:
        """Make ``size`` bytes of physical memory that can be exported; returns the handle."""
        return self.cuda.create(self._device, self.size)

    def reserve(self) -> int:
        return self.cuda.reserve(self.size)

    def map(self, address: int, handle: int) -> None:
        self.cuda.map_at(address, self._device, handle, self.size)

    def unmap(self, address: int, handle: int) -> None:
        """Unmap the memory and release its handle; the address stays reserved."""
        self.cuda.unmap_at(address, self.size)
        self.cuda.release(handle)

    def fill(self, address: int, value: int) -> None:
        self.cuda.fill(address, value, self.size)

    def holds(self, address: int, value: int) -> bool:
        """Whether every 32-bit word of the memory at the address has the value."""
        words = self.size // 4
        return self.cuda.read(address, self.size) == value.to_bytes(4, "little") * words
