# SPDX-License-Identifier: Apache-2.0
"""Jobs on the simulated CUDA and NCCL of tests/doubles/gpu, for the lab.

Device memory is host memory, streams are threads, and a collective hangs until all of its members
have come. The rest is real: CRIU, agents, the network.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from doubles.gpu.build import build, program
from doubles.gpu.build_nccl import build_nccl
from lab_session import JOBS, ROOT

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Device:
    """The doubles, built below ``folder``, which all lab hosts share."""

    folder: Path
    cuda: Path
    nccl: Path

    @classmethod
    def built(cls, folder: Path) -> Device:
        return cls(folder, build(folder).folder, build_nccl(folder).parent)

    @property
    def environment(self) -> tuple[str, ...]:
        """Put before a command; NumPy's sums do not depend on how many threads there are."""
        path = f"LD_LIBRARY_PATH={self.cuda}:{self.nccl}"
        return ("env", path, "OPENBLAS_NUM_THREADS=1")

    def ddp(self, steps: int, pace: float = 0.05) -> tuple[str, ...]:
        """jobs/device_ddp.py: data-parallel, in Python, by ctypes."""
        script = str(JOBS / "device_ddp.py")
        return (
            *self.environment,
            sys.executable,
            script,
            "--steps",
            str(steps),
            "--pace",
            str(pace),
            "--out",
            "{out}",
        )

    def train(self, ranks: int, steps: int) -> tuple[str, ...]:
        """nccl_adapter/train.c: every kind of call, two threads, splits that come and go."""
        target = self.folder / "train"
        if not target.exists():
            libraries = [
                self.nccl / "libnccl.so.2",
                self.cuda / "libcudart.so.13",
                self.cuda / "libcuda.so.1",
            ]
            program(TESTS / "support" / "gpu" / "nccl_adapter" / "train.c", target, libraries)
        command = f"exec {target} {{out}} $RANK {ranks} {steps}"
        return (*self.environment, "sh", "-c", command)
