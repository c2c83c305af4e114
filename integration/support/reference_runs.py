# SPDX-License-Identifier: Apache-2.0
"""The same job without liveshift, once per command for a whole run: what must come out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from free_ports import free_port

COUNTED_IN = 250
"""Runs that only have to go further than a job end after a multiple of this many steps, so that
several jobs can be compared with one of them."""


@dataclass(frozen=True)
class Result:
    """What a job computed: (step, loss in hex) of every rank, and its parameters' SHA-256."""

    losses: dict[int, list[tuple[int, str]]]
    digests: dict[int, str]

    def assert_equals(self, other: Result) -> None:
        """Bit for bit; names the first step that differs."""
        for rank, expected in other.losses.items():
            for (step, loss), wanted in zip(self.losses[rank], expected, strict=True):
                assert (step, loss) == wanted, f"rank {rank} differs first in step {step}"
        assert self.digests == other.digests


def read_result(out: Path, ranks: int, steps: int | None = None) -> Result:
    """``steps``: what it had come to after so many, of a job that remembers that."""
    name = "final" if steps is None else f"after{steps}-"
    losses: dict[int, list[tuple[int, str]]] = {}
    digests: dict[int, str] = {}
    for rank in range(ranks):
        lines = (out / f"rank{rank}.jsonl").read_text().splitlines()[:steps]
        losses[rank] = [(s["step"], s["loss_hex"]) for s in map(json.loads, lines)]
        digests[rank] = json.loads((out / f"{name}{rank}.json").read_text())["sha256"]
    return Result(losses, digests)


@dataclass
class References:
    """Runs each command once, as a person without liveshift would, and keeps what came out.

    Other processes may use the same ``place`` at the same time, with the same environment.
    """

    place: Path
    environment: dict[str, str]
    patience: float = 90.0  # seconds in which a run must have written something

    def of(self, argv: Sequence[str], nnodes: int = 1, ranks: int = 1) -> Result:
        """The result of the command; ``{out}`` in it is its directory, ``--pace`` is left out."""
        return read_result(self.directory(argv, nnodes), ranks)

    def further_than(self, steps: int, argv: Sequence[str], nnodes: int = 1) -> Path:
        """A run of a command with ``--steps``, which would have gone on for long, that made more
        steps than this one: the job's last steps are compared too, and few more are computed. No
        step may depend on how many follow."""
        words = list(argv)
        number = words.index("--steps") + 1
        last = int(words[number])
        assert steps < last, f"a run of {last} steps does not go further than {steps}"
        shortest = steps // COUNTED_IN * COUNTED_IN + COUNTED_IN
        lengths = [*range(shortest, last, COUNTED_IN), last]
        for length in lengths:
            words[number] = str(length)
            if (known := self._place_of(_unpaced(words), nnodes)).exists():
                return known
        words[number] = str(lengths[0])
        return self.directory(words, nnodes)

    def directory(self, argv: Sequence[str], nnodes: int = 1) -> Path:
        words = _unpaced(argv)
        known = self._place_of(words, nnodes)
        with known.with_name(f"lock-{known.name}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
            if not known.exists():
                try:
                    made = self._run(words, nnodes)
                except TimeoutError as hung:
                    # No fault of ours: the port was taken meanwhile, a rendezvous that never came.
                    print(f"an untouched run is begun again: {hung}")
                    made = self._run(words, nnodes)
                made.rename(known)
        return known

    def _place_of(self, words: Sequence[str], nnodes: int) -> Path:
        key = hashlib.sha256("\0".join((str(nnodes), *words)).encode()).hexdigest()[:16]
        return self.place / f"reference-{key}"

    def _run(self, words: Sequence[str], nnodes: int) -> Path:
        out = Path(tempfile.mkdtemp(prefix="begun-", dir=self.place))
        with self._started(words, nnodes, out) as processes:
            grown, until = -1, 0.0
            while any(process.poll() is None for process in processes):
                if (size := _written(out)) != grown:
                    grown, until = size, time.monotonic() + self.patience
                if time.monotonic() > until:
                    raise TimeoutError(f"nothing for {self.patience:g} s\n{_said(out)}")
                time.sleep(0.05)
            codes = [process.returncode for process in processes]
        assert codes == [0] * nnodes, f"the reference run itself failed:\n{_said(out)}"
        return out

    @contextmanager
    def _started(
        self, words: Sequence[str], nnodes: int, out: Path
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Ends with all that they started, since torchrun's workers outlive a torchrun that is
        killed."""
        words = [word.replace("{out}", str(out)) for word in words]
        port = str(free_port())
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(nnodes):
            env = {
                "PET_NNODES": str(nnodes),
                "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "127.0.0.1",
                "PET_MASTER_PORT": port,  # one that is free here
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_HOSTID": f"reference-{rank}",  # two ranks may then share one device
                "TMPDIR": str(out),  # torchrun and torch leave directories there
            }
            if nnodes > 1:
                env |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(nnodes),
                    "LOCAL_RANK": "0",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            with (out / f"output{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        words,
                        env=self.environment | env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    for each in psutil.Process(process.pid).children(recursive=True):
                        each.kill()
                    process.kill()
                    process.wait()


def _written(out: Path) -> int:
    """Bytes of its output and of its step logs."""
    return sum(path.stat().st_size for path in (*out.glob("output*"), *out.glob("*.jsonl")))


def _said(out: Path) -> str:
    return "".join(each.read_text() for each in sorted(out.glob("output*")))


def _unpaced(argv: Sequence[str]) -> list[str]:
    """The command without ``--pace SECONDS``, which changes nothing but how long it takes."""
    words = list(argv)
    while "--pace" in words:
        at = words.index("--pace")
        del words[at : at + 2]
    return words
