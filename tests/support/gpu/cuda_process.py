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
from told_process import ToldProcess

from liveshift.waiting import readable

INSIDE = Path(build.__file__).with_name("inside.py")
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)


@pytest.fixture(scope="session")
def doubles() -> build.Doubles:
    """The simulated libraries, built once for all runs from the same sources."""
    return build.build(BUILT)


class CudaProcess(ToldProcess):
    """Started with the GPUs that ``devices`` describes; ``do`` evaluates in it, with the
    functions of doubles/gpu/inside.py and ``cu`` as libcuda."""

    def __init__(
        self,
        doubles: build.Doubles,
        devices: str,
        prefix: Sequence[str] = (),
        **environment: str,
    ) -> None:
        super().__init__(
            subprocess.Popen(
                [*prefix, PYTHON, "-S", str(INSIDE), str(doubles.libcuda)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"PATH": os.environ["PATH"], "SIMCUDA_DEVICES": devices, **environment},
            )
        )

    def do(self, expression: str) -> Any:
        self.begin(expression)
        return self.answer()

    def answer(self) -> Any:
        return ast.literal_eval(self.line())

    def answered(self, seconds: float) -> bool:
        """Whether an answer comes within that time."""
        return bool(readable(seconds, self._answers))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)
