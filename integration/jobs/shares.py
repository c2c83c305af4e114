# SPDX-License-Identifier: Apache-2.0
"""What the jobs that lose a host compute: a small GPT that reads a large data set in memory.

The data are read, never written, so most of a rank's memory is cold. A rank's share of a step
follows from the step and the rank alone, so that whoever trains it gets the same bits.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from steplog import StepLog, arguments, digest

BEGAN = time.time()
"""Before torch is imported, which takes seconds on a busy machine."""
SAMPLES, LENGTH = 2, 64


def options() -> argparse.ArgumentParser:
    parser = arguments()
    parser.add_argument("--size", type=int, required=True, help="bytes, the interpreter's with it")
    return parser


def open_log(out: Path, rank: int) -> StepLog:
    """The rank's record, to which each process that is this rank adds: first that it has begun,
    when, and on which host."""
    log = StepLog(out, rank, append=True)
    log.note(began=BEGAN, pid=os.getpid(), host=socket.gethostname())
    return log


class Share:
    """A model, and the data set of which each rank reads its own samples."""

    def __init__(self, size: int) -> None:
        import torch

        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
        from sized import BARE, LEAST, LETTERS, noise
        from train_gpt import GPT

        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(7)
        self.data = noise(max(size - BARE, LEAST))
        self.net = GPT(LETTERS, LENGTH, width=64, depth=2)
        self._torch = torch

    def rows(self, step: int, rank: int) -> tuple[Any, Any]:
        """What is read and what is to be predicted, of one rank in one step."""
        chance = self._torch.Generator().manual_seed(2 * step + rank)
        last = len(self.data) - LENGTH
        starts = self._torch.randint(last, (SAMPLES,), generator=chance).tolist()
        rows = self._torch.stack([self.data[s : s + LENGTH + 1] for s in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def optimizer(self, parameters: Any) -> Any:
        return self._torch.optim.AdamW(parameters, lr=1e-3)

    def record(self, log: StepLog, step: int, loss: Any, part: int, pace: float) -> None:
        """``part``: the rank whose share of the step this process has trained."""
        log.step(step, loss, pace, part=part, sha256=digest(self.net.parameters()))
