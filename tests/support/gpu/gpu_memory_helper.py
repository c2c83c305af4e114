# SPDX-License-Identifier: Apache-2.0
"""GPU helpers on the simulated driver whose device memory tests make, fill and read."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.gpu import build
from gpu_helper import end_helper

from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.cuda_snapshot.helper.ring import SIZES
from liveshift.errors import Unreachable

MIB = 1 << 20
ARENA = 15
UA, UB = (f"GPU-{d * 8}-{d * 4}-{d * 4}-{d * 4}-{d * 12}" for d in "ab")
TWO = f"{UA}:H200:256MiB,{UB}:H200:256MiB"


class Helper:
    """Connects to a helper with a ring and GPUs of that kind; many tests share one, one after the
    other: to start one takes longer than most of them."""

    def __init__(self, folder: Path, libraries: Path) -> None:
        self._folder, self._libraries = folder, libraries
        self._clients: list[GpuHelper] = []
        self.directory = folder

    def __call__(self, ring: str = "4x1048576", devices: str = TWO) -> GpuHelper:
        name = hashlib.sha256(f"{ring} {devices}".encode()).hexdigest()[:12]
        self.directory = self._folder / name
        self.directory.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SIMCUDA_DEVICES", devices)
            patch.setenv(SIZES, ring)
            self._clients.append(GpuHelper.start(self.directory, self._libraries))
        return self._clients[-1]

    def end(self, leave: bool = False) -> None:
        """After a test: what it left is dropped."""
        clients, self._clients = self._clients, []
        for client in clients:
            with client, contextlib.suppress(Unreachable):
                for key in client.held():
                    client.drop(key)
                if leave:
                    end_helper(client)


@pytest.fixture(scope="session")
def helpers(doubles: build.Doubles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with one for each kind in it; all are ended."""
    folder = tmp_path_factory.mktemp("helpers")
    yield folder
    for directory in folder.iterdir():
        helper = GpuHelper(directory, doubles.folder)
        with helper, contextlib.suppress(Unreachable):
            end_helper(helper)


@pytest.fixture
def helper(doubles: build.Doubles, helpers: Path) -> Iterator[Helper]:
    helper = Helper(helpers, doubles.folder)
    yield helper
    helper.end()


def fill(gpu: GpuHelper, key: str, data: bytes, seed: int = 1) -> None:
    """In pieces of all sizes."""
    dice = random.Random(seed)
    view = memoryview(data)
    with gpu.filler(key) as filler:
        while view:
            part = min(len(view), dice.choice([1, 511, 4096, 70_001, MIB, 3 * MIB + 5]))
            filler.write(view[:part])
            view = view[part:]
        figures = filler.finish()
    assert figures.bytes == len(data)
    assert figures.seconds > 0
    assert 0 <= figures.waited_s <= figures.seconds


def drained(gpu: GpuHelper, key: str) -> bytes:
    with gpu.drain(key) as drain:
        data = b"".join(bytes(view) for view in drain)
        assert drain.figures is not None
        assert drain.figures.bytes == drain.total == len(data)
    return data
