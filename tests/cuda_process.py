# SPDX-License-Identifier: Apache-2.0
"""A process that uses the simulated CUDA at a test's word: one expression a line, one answer."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from captured import PYTHON
from doubles.gpu import build
from sanitizers import BUILT

from liveshift.waiting import readable

INSIDE = Path(build.__file__).with_name("inside.py")
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)


@pytest.fixture(scope="session")
def doubles() -> build.Doubles:
    """The simulated libraries, built once for all runs from the same sources."""
    return build.build(BUILT)


class CudaProcess:
    """Started with the GPUs that ``devices`` describes; ``do`` evaluates in it, with the
    functions of doubles/gpu/inside.py and ``cu`` as libcuda."""

    def __init__(
        self,
        doubles: build.Doubles,
        devices: str,
        prefix: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self._process = subprocess.Popen(
            [*prefix, PYTHON, "-S", str(INSIDE), str(doubles.libcuda)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "SIMCUDA_DEVICES": devices, **environment},
        )
        self.pid = self._process.pid

    def do(self, expression: str) -> Any:
        self.begin(expression)
        return self.answer()

    def begin(self, expression: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(expression.encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        assert line, f"it ended with {self.wait()}"
        return ast.literal_eval(line)

    def answered(self, seconds: float) -> bool:
        """Whether an answer comes within that time."""
        assert self._process.stdout is not None
        return bool(readable(seconds, self._process.stdout))

    def wait(self) -> int:
        return self._process.wait(timeout=20)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
