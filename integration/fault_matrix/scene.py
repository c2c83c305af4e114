# SPDX-License-Identifier: Apache-2.0
"""Where a move is harmed: a lab of three hosts.

Rank 0 stays on h0; rank 1, the capsule of all cells, goes to and fro between h1 and h2.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.launcher.client.client import Client
from liveshift.runtime.messages import GetMigration, Migrate, MigrationDetails, MigrationRow, Named

from .stage import HARMED, Stage

HOSTS = ("h1", "h2")
"""Between which the capsule is moved."""


@dataclass(frozen=True)
class Order:
    """How the move of a cell is asked for. ``way``: as in messages.Migrate; empty: the lab's way,
    which is rounds. ``within``: its deadline in seconds; 0: none."""

    way: str = ""
    within: float = 0.0


USUAL = Order()


class Scene(Stage):
    """The move of a cell goes from ``source`` to ``destination``."""

    lab_options = ("--hosts", "3")

    def __init__(self, place: Path, references: References, stall_s: float) -> None:
        super().__init__(place, references, stall_s)
        self.migration = ""
        self.source = self.destination = ""

    def prepare(self) -> None:
        super().prepare()
        self.source = self.job.seen(HARMED).host
        assert self.source in HOSTS, f"rank {HARMED} is on {self.source}"
        self.destination = next(host for host in HOSTS if host != self.source)

    def lab_is_up(self) -> None:
        for host in HOSTS:
            self._state_in_memory(host)

    def _state_in_memory(self, host: str) -> None:
        """Put a host's state directory, which the lab keeps on this machine's disk, on a file
        system of its own, which may be filled; the host is booted to see it."""
        state = self.lab.directory / host / "state"
        labs.kill_host(self.lab, host)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700", "state", state], check=True)
        labs.boot_host(self.lab, host)
        self.session.start_agent(host)

    # ---- what people ask ----

    def migrate(self, order: Order) -> None:
        """Ask for the migration of the cell; it has begun when this returns."""
        ask = Migrate(
            self.capsule,
            self.destination,
            "a cell",
            dry_run=False,
            way=order.way,
            within=order.within,
        )
        with Client(self.lab.socket) as client:
            self.migration = client.get(Named, ask).name

    def row(self) -> MigrationRow:
        with Client(self.lab.socket) as client:
            return client.get(MigrationDetails, GetMigration(self.migration)).row

    def is_over(self) -> bool:
        """Whether the orchestrator says that the migration is over."""
        status = self.status()
        return status is not None and self.migration not in {row.name for row in status.moving}


def source(scene: Scene) -> str:
    return scene.source


def destination(scene: Scene) -> str:
    return scene.destination
