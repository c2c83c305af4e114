# SPDX-License-Identifier: Apache-2.0
"""Waits for the end of a move."""

from __future__ import annotations

import time

from liveshift.launcher.client.client import Client
from liveshift.launcher.show.moves import over
from liveshift.runtime.messages import GetMigration, MigrationDetails, MigrationRow


def ended(client: Client, name: str, patience_s: float, look_s: float = 0.1) -> MigrationRow:
    """The move once it is over; fails after ``patience_s``. ``look_s``: between two looks."""
    until = time.monotonic() + patience_s
    while True:
        row = client.get(MigrationDetails, GetMigration(name)).row
        if over(row):
            return row
        assert time.monotonic() < until, f"{name} is {row.state} for {patience_s:g} s: {row}"
        time.sleep(look_s)
