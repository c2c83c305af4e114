# SPDX-License-Identifier: Apache-2.0
"""The helper's contexts: one on each GPU that a move uses, and only while it does.

A context costs its GPU some 500 MiB, which training may need. The driver counts how often a primary
context was retained, so this module does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import LiveshiftError, NotFound
from ..cuda import Cuda
from ..driver import CudaError, CUresult


class Contexts:
    """The GPUs of this host and their primary contexts, by UUID. Any thread may use it."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._ordinals = {gpu: ordinal for ordinal, gpu in enumerate(cuda.uuids())}

    def ordinal(self, gpu: str) -> int:
        """The number of a GPU on this host. Raises NotFound."""
        try:
            return self._ordinals[gpu]
        except KeyError:
            raise NotFound(
                f"this host has no {gpu}; it has {', '.join(self._ordinals) or 'none'}"
            ) from None

    def retain(self, gpu: str) -> int:
        """Keep a context on the GPU until :meth:`let_go` was called as often. Raises NotFound, and
        LiveshiftError if the GPU's memory has no room for a context."""
        try:
            return self.cuda.retain(self.ordinal(gpu))
        except CudaError as error:
            if error.result != CUresult.OUT_OF_MEMORY:
                raise
            raise LiveshiftError(
                f"{gpu} has no room left for a CUDA context of the GPU helper (about 500 MB)",
                hint="Leave that much of the GPU unused, or set [gpu] fast_path = 'off'.",
            ) from error

    def let_go(self, gpu: str) -> None:
        """Undo one :meth:`retain`."""
        self.cuda.let_go(self.ordinal(gpu))

    @contextmanager
    def current(self, gpu: str) -> Iterator[int]:
        """The GPU's context, which is this thread's current one while the with block runs."""
        context = self.retain(gpu)
        try:
            self.cuda.push(context)
            try:
                yield context
            finally:
                self.cuda.pop()
        finally:
            self.let_go(gpu)
