# SPDX-License-Identifier: Apache-2.0
"""A job that is saved in a directory, and resumed from it, perhaps in another cluster. The hosts
are stand-ins that keep in ``disk`` what they have written; manifests and signatures are real."""

from __future__ import annotations

from pathlib import Path

import pytest
from suspensions_scene import SuspensionsScene

from liveshift.errors import NotFound
from liveshift.runtime import messages
from liveshift.runtime.control import keys
from liveshift.runtime.control.signatures import Signatures
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import Message, ResumptionOrdered
from liveshift.runtime.snapshot import saved_snapshot
from liveshift.runtime.snapshot.saved_snapshot import SavedSnapshot

DISK = "/kept"


class SavedScene(SuspensionsScene):
    """``disk``: the manifests, by directory, job and snapshot. ``loaded``: what hosts were asked to
    load. ``asks``: all requests to hosts."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
        self.signatures = Signatures(secret)
        self.disk: dict[tuple[str, str, str], bytes] = {}
        self.loaded: list[tuple[str, messages.LoadHeld]] = []
        self.asks: list[tuple[str, Message]] = []
        super().__init__(state, monkeypatch)

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self.saved._images._signatures = self.signatures

    async def save(self) -> SavedSnapshot:
        """Save the job while it runs, and wait for the end."""
        done = len(self.history("saved"))
        self.ordered.save("root", self.job, DISK, dry_run=False)
        await self.until(lambda: len(self.history("saved")) > done)
        return self.on_disk()

    def on_disk(self, name: str = "") -> SavedSnapshot:
        data = {key[2]: data for key, data in self.disk.items() if key[:2] == (DISK, "a")}
        found = data[name] if name else list(data.values())[-1]
        return saved_snapshot.decode(found, self.signatures, DISK)[0]

    def put(self, saved: SavedSnapshot) -> None:
        """As another cluster with the same key would have saved it."""
        data = saved_snapshot.encode(saved, self.signatures)
        self.disk[DISK, saved.job, saved.snapshot] = data

    async def adopt(
        self, name: str = "a", snapshot: str = "", *, dry_run: bool = False
    ) -> ResumptionOrdered:
        return await self.suspensions.resume_saved("root", name, DISK, snapshot, dry_run=dry_run)

    def end_job(self) -> None:
        for capsule in list(self.job.capsules.values()):
            self.endings.capsule_ended(self.job, capsule, 0)
        assert self.job.state == "ended"

    def journal(self) -> list[object]:
        """All that it has of jobs and snapshots."""
        tables = ("jobs", "capsules", "snapshots", "rewinds", "rewound", "events")
        rows = self.fleet.journal.file.rows
        return [rows(f"SELECT * FROM {table}") for table in tables]  # noqa: S608

    async def request(self, host: str, message: Message, limit: float) -> Message | None:
        self.asks.append((host, message))
        answer = await super().request(host, message, limit)
        match message:
            case messages.SaveHeld():
                return messages.Saved(100, f"digest of {message.image}")
            case messages.WriteManifest():
                key = (message.directory, message.job, message.snapshot)
                assert key not in self.disk
                self.disk[key] = message.data
                return None
            case messages.ReadManifest():
                return messages.SavedManifest(self._read(message))
            case messages.LoadHeld():
                self.loaded.append((host, message))
                return None
            case messages.CutBack():
                return messages.CutBackDone([], [])
        return answer

    def _read(self, ask: messages.ReadManifest) -> bytes:
        found = [
            data
            for (directory, job, name), data in self.disk.items()
            if (directory, job) == (ask.directory, ask.job) and ask.snapshot in ("", name)
        ]
        if not found:
            raise NotFound(f"{ask.directory} has no snapshot of {ask.job}")
        return found[-1]


def a_secret(directory: Path) -> Path:
    keys.init(directory, ["h0"])
    return directory


@pytest.fixture
def saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedScene:
    return SavedScene(tmp_path / "state", monkeypatch, a_secret(tmp_path / "keys"))
