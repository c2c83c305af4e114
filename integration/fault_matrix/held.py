# SPDX-License-Identifier: Apache-2.0
"""Daemons held at a named point of a migration (runtime/daemon/faultpoints.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab_session import eventually

from liveshift.runtime.daemon.faultpoints import GPU_POINTS, POINTS, SNAPSHOT_POINTS

VARIABLE = "LIVESHIFT_FAULTPOINTS"


class Held:
    """The directory that all daemons of a lab look into; made when it is not there.

    This process, and so every daemon that it starts from now on, has it in its environment.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        os.environ[VARIABLE] = str(directory)

    def arm(self, point: str) -> None:
        """The next daemon that comes to this point stops there."""
        assert point in POINTS + GPU_POINTS + SNAPSHOT_POINTS
        (self.directory / point).touch()

    def reached(self, point: str) -> bool:
        """Whether a daemon has come there, and waits."""
        return (self.directory / f"{point}.reached").exists()

    def wait(self, point: str, timeout: float = 30.0) -> None:
        """Until a daemon has come there."""
        eventually(lambda: self.reached(point), f"{point} to be reached", timeout)

    def release(self, point: str) -> None:
        """Let go on whoever is held there; nothing happens when that has been killed."""
        (self.directory / f"{point}.reached").unlink(missing_ok=True)

    def names(self) -> list[str]:
        """What is armed or held."""
        return sorted(path.name for path in self.directory.iterdir())

    def clear(self) -> None:
        """Disarm all, and let all go on."""
        for name in self.names():
            (self.directory / name).unlink(missing_ok=True)


@contextmanager
def holding(directory: Path) -> Iterator[Held]:
    """Points for the labs that are made meanwhile; at the end none is held, nor in the
    environment."""
    made = Held(directory)
    try:
        yield made
    finally:
        made.clear()
        os.environ.pop(VARIABLE)
