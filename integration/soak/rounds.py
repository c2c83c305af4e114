# SPDX-License-Identifier: Apache-2.0
"""Moves, one after the other, as fast as they go: first one rank to the free host, then the other
to the host that has become free, round and round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moves_ended import ended

from liveshift.errors import Refused
from liveshift.launcher.client.client import Client
from liveshift.runtime.messages import Migrate, MigrationRow, Named

LOOK_S = 0.02
AGAIN_S = 0.1
STUCK_S = 120.0


@dataclass
class Rounds:
    """The moves of one job of ``ranks`` capsules on one host more than that."""

    socket: Path
    job: str
    ranks: int
    rows: list[MigrationRow] = field(default_factory=list)
    refused: int = 0

    @property
    def failed(self) -> list[MigrationRow]:
        return [row for row in self.rows if row.state != "done"]

    def go(self, goes_on: Callable[[], bool]) -> None:
        """Move until told that it is enough; raises LiveshiftError when a move is not possible."""
        with Client(self.socket) as client:
            while goes_on():
                capsule = f"{self.job}/{len(self.rows) % self.ranks}"
                name = self._ask(client, capsule)
                self.rows.append(ended(client, name, STUCK_S, LOOK_S))

    def _ask(self, client: Client, capsule: str) -> str:
        until = time.monotonic() + STUCK_S
        while True:
            try:
                return client.get(Named, Migrate(capsule, "", "soak", False)).name
            except Refused:  # the host that the last one left is not free yet
                self.refused += 1
                if time.monotonic() > until:
                    raise
            time.sleep(AGAIN_S)
