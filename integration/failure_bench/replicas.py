# SPDX-License-Identifier: Apache-2.0
"""torchft: replicas that train together as long as enough of them are there.

As its README has it: a lighthouse, and on each host a replica group of one process under torchrun.
Two groups train and a third computes along as a spare (FIXED_WITH_SPARES), so that the job computes
the same all the time. The lighthouse is on a machine that is never killed. A host that was booted
again restarts its group, which takes over the state from another one.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from importlib.metadata import distributions
from pathlib import Path

from host_programs import inside

from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab

from .cases import Case, training
from .history import History
from .hosts import CONTROL, Programs

PLACE = Path(__file__).resolve().parents[2] / "build/torchft"
"""Where ``make bench-failure FETCH=1`` puts torchft and what it needs besides torch."""
PORT, STORE_PORT = 29510, 29600
RECENT_S = 1.0


def version() -> str:
    """Of the torchft that is there; "" if none is."""
    for found in distributions(path=[str(PLACE)]):
        if found.metadata["Name"].startswith("torchft"):
            return f"{found.metadata['Name']} {found.version}"
    return ""


class Replicated:
    """The job as replica groups on three hosts of a lab without liveshift."""

    def __init__(
        self, lab: Lab, case: Case, steps: int, pace: float, out: Path, cleanup: ExitStack
    ) -> None:
        self.lab = lab
        self.history = History(out, case.hosts, case.ranks)
        self._out = out
        self._ranks, self._groups = case.ranks, case.hosts
        self._programs = Programs(lab, out, cleanup)
        words = training(case, steps, pace)[1:]
        self._words = inside(out, [*words, "--torchft", f"{case.suspicion:g}"])
        self._programs.start(
            CONTROL,
            [
                *("python", str(PLACE / "bin/torchft_lighthouse"), "--bind", f"0.0.0.0:{PORT}"),
                *("--min_replicas", str(case.ranks), "--quorum_tick_ms", "100"),
                *("--join_timeout_ms", "10000"),
                *("--heartbeat_timeout_ms", str(round(1000 * case.suspicion))),
            ],
            PYTHONPATH=str(PLACE),
        )
        for host in lab.hosts:
            self._group(host)

    def _group(self, host: str) -> None:
        machine = self.lab.machine(host)
        number = list(self.lab.hosts).index(host)
        self._programs.start(
            host,
            [
                *("torchrun", "--nnodes", "1", "--nproc-per-node", "1"),
                *("--master-addr", machine.address, "--master-port", str(STORE_PORT)),
                *self._words,
            ],
            PYTHONPATH=str(PLACE),
            REPLICA_GROUP_ID=str(number),
            TORCHFT_LIGHTHOUSE=f"http://{self.lab.machine(CONTROL).address}:{PORT}",
        )

    def alive(self) -> None:
        """The groups say nothing; the waits have their deadlines."""

    def ready(self) -> bool:
        """All groups compute along."""
        since = time.time() - RECENT_S
        hosts = {each.host for each in self.history.lines if each.time > since}
        return len(hosts) == self._groups

    def trained(self) -> bool:
        return self.ready()

    def host_of(self, rank: int) -> str:
        return self.history.host_of(rank)

    def process_of(self, rank: int) -> int:
        return self._programs.trains(self.host_of(rank), self._words[0])

    def noticed(self, cut: float) -> tuple[float | None, str]:
        return None, ""

    def lost(self, host: str) -> None:
        """The spare is there already."""

    def replace(self, host: str) -> None:
        labs.boot_host(self.lab, host)
        self._group(host)

    def restart(self, host: str) -> None:
        """torchrun ends with its only process, which whoever runs the job starts again."""
        self._group(host)

    def said(self) -> str:
        return self._programs.said()

    def ended(self) -> bool:
        found = sum((self._out / f"final{group}.json").exists() for group in range(self._groups))
        return found >= self._ranks
