# SPDX-License-Identifier: Apache-2.0
"""A sink for image streams, and what a capsule of the tests is started with."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import pytest

from liveshift.criu_glue.capsule.sandboxes import PID_FLOOR

PYTHON = str(Path(sys.executable).resolve())  # not the environment's, which may lie below /tmp
ENV = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
ROOT_PID = PID_FLOOR + 1
numbers = itertools.count()


class Sink:
    """Keeps what comes; stands in for the source's Sender."""

    def __init__(self) -> None:
        self.images: dict[str, bytearray] = {}
        self.ended: set[str] = set()
        self.fails: Exception | None = None
        self.pause_s = 0.0

    def __call__(self, name: str, data: bytes) -> None:
        time.sleep(self.pause_s)
        if self.fails:
            raise self.fails
        assert name not in self.ended
        self.images.setdefault(name, bytearray()).extend(data)
        if not data:
            self.ended.add(name)

    def write_to(self, directory: Path) -> None:
        directory.mkdir()
        for name, data in self.images.items():
            (directory / name).write_bytes(data)


@pytest.fixture
def sink() -> Sink:
    return Sink()
