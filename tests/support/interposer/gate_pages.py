# SPDX-License-Identifier: Apache-2.0
"""A process of a job as its host sees it: a page that does as a test says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from simulated_gate import GO, build, ffi

from liveshift.interposer.layout import Library
from liveshift.interposer.orders import OrderedPage, open_ordered

WORLD = 70
TID = 5


class Process:
    """A rank with one communicator and one thread."""

    def __init__(self, lib: Any, folder: Path, rank: int, identity: int = WORLD) -> None:
        self.lib, self.path = lib, folder / str(1000 + rank)
        draft = os.fsencode(folder / ".draft")
        self.gate = lib.sim_process(draft, os.fsencode(self.path), 1000 + rank, rank)
        self.made = lib.sim_communicator(self.gate, Library.NCCL, identity, 4, rank, b"dp")
        self.clock = lib.sim_clock(self.gate, self.made, -1, -1)
        self.wants: Any = None
        self.waiter: Any = None

    def begin(self, clock: int | None = None) -> int:
        """One operation as far as the gate lets it; the verdict of asking once."""
        row = self.clock if clock is None else clock
        self.lib.sim_announce(self.gate, row, 1, TID)
        if self.lib.sim_is_open(self.gate):
            return GO
        self.wants = ffi.new("struct gate_want[]", [(row, 1, 1, True, False)])
        self.waiter = ffi.new("struct gate_waiter *")
        return self.again()

    def again(self) -> int:
        return int(self.lib.sim_try(self.gate, self.wants, 1, TID, self.waiter))

    def end(self, clock: int | None = None) -> None:
        self.lib.sim_end(self.gate, self.clock if clock is None else clock)

    def ordered(self) -> OrderedPage:
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            return open_ordered(self.path, directory)
        finally:
            os.close(directory)


@pytest.fixture(scope="module")
def lib() -> Any:
    return build()
