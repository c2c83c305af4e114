# SPDX-License-Identifier: Apache-2.0
"""What every training job of the tests leaves behind, in the form of examples/train_gpt.py:
``rank<R>.jsonl`` with a line per step and ``final<R>.json`` with the digest of all parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np


def arguments() -> argparse.ArgumentParser:
    """What every such job is told; some add their own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--stop-file", type=Path, help="may name an earlier last step, at any time")
    return parser


def last_step(args: argparse.Namespace) -> int:
    """As examples/train_gpt.py has it, for the jobs that ask after each step: ``--steps``, or the
    earlier one that ``--stop-file`` names, which no rank has come to yet."""
    if args.stop_file is None or not args.stop_file.exists():
        return int(args.steps)
    return min(int(args.steps), int(args.stop_file.read_text()))


class StepLog:
    """One rank's record; lines are whole and on disk at once. ``append``: after those of a process
    that was this rank before. The file is then open only while a line is written, so a rewind does
    not cut it back, and keeps what was written since its snapshot."""

    def __init__(self, out: Path, rank: int, append: bool = False) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._rank = out, rank
        self._path = out / f"rank{rank}.jsonl"
        self._log = None if append else self._path.open("w", buffering=1)
        self._last = time.monotonic()

    def step(self, step: int, loss: Any, pace: float = 0.0, **more: Any) -> None:
        """Record a step and its loss, a number or a tensor, and stay in it until ``pace`` seconds
        have passed since the last; no longer once it is hurried."""
        if not self.hurried:
            time.sleep(max(0.0, self._last + pace - time.monotonic()))
        self._last = time.monotonic()
        line = {"step": step, "loss_hex": _plain(loss).hex(), "time": time.time(), **more}
        self._write(line)

    def note(self, **line: Any) -> None:
        """Record something that is no step."""
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        if self._log is not None:
            self._log.write(text)
            return
        with self._path.open("a") as log:
            log.write(text)

    @property
    def hurried(self) -> bool:
        """Whether a file says that there is nothing more to wait for (Job.result)."""
        return (self._out / "hurry").exists()

    def end(self, parameters: Iterable[Any], name: str = "final", **more: Any) -> None:
        final = {"sha256": digest(parameters), **more}
        (self._out / f"{name}{self._rank}.json").write_text(json.dumps(final) + "\n")


def leave() -> NoReturn:
    """End the process well, without torch's own teardown.

    Gloo's threads drop the tensors of the last collective, for which they need the GIL. Where the
    process group ends before that, torch 2.13 hangs or aborts ("terminate called without an active
    exception"): seen in one run of the bare program in six, with no liveshift near it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.2)  # what the last collective has to send is sent
    os._exit(0)


def _plain(loss: Any) -> float:
    return float(loss.detach() if hasattr(loss, "detach") else loss)


def digest(parameters: Iterable[Any]) -> str:
    """SHA-256 over the bytes of torch's tensors or NumPy's arrays."""
    found = hashlib.sha256()
    for each in parameters:
        array = each if isinstance(each, np.ndarray) else each.detach().cpu().numpy()
        found.update(array.tobytes())
    return found.hexdigest()


def rank_and_world() -> tuple[int, int]:
    """(rank, number of ranks), as torchrun or liveshift says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def place() -> tuple[int, int]:
    """The same, for a job that computes with torch: alike in every run."""
    import torch  # only here: a job that computes with NumPy starts without it

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    return rank_and_world()
