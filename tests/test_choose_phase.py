# SPDX-License-Identifier: Apache-2.0
"""Measuring the link and choosing the way is a phase of a migration, and those after it are shown
where they were."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.runtime import messages
from liveshift.runtime.agent import source_handlers
from liveshift.runtime.agent.source_handlers import SourceHandlers
from liveshift.runtime.messages import Moved, StartPrecopy
from liveshift.runtime.model.stopwatch import Stopwatch
from liveshift.runtime.model.timeline import Timeline

MEASURED_S, FILES_S = 0.2, 0.05


class Lanes:
    def measure(self) -> float:
        time.sleep(MEASURED_S)
        return 2.5e9


class Departure:
    """Sends files, and no memory."""

    def __init__(self, *_: Any) -> None:
        self.memory: Any = None
        self.full_dump = ""
        self.gpus: list[str] = []

    def precopy(self, _until: float, watch: Stopwatch) -> Moved:
        with watch.phase("files ahead"):
            time.sleep(FILES_S)
        return Moved(0, watch.phases)


async def blocking(_capsule: str, work: Callable[[], Moved]) -> Moved:
    return await asyncio.to_thread(work)


def source(monkeypatch: pytest.MonkeyPatch, full_dump: str) -> SourceHandlers:
    monkeypatch.setattr(source_handlers, "OutgoingMigration", Departure)
    monkeypatch.setattr(
        source_handlers, "PrecopyRounds", lambda *_: SimpleNamespace(rate=0.0, chosen=None)
    )
    monkeypatch.setattr(source_handlers, "full_dump_because", lambda *_: full_dump)
    monkeypatch.setattr(source_handlers.link_rates, "keep", lambda *_: None)
    cluster = SimpleNamespace(precopy=None, paths=SimpleNamespace(run=None))
    capsules = SimpleNamespace(host="h1", cluster=cluster, factory=None, blocking=blocking)
    registry = SimpleNamespace(
        criu=object(),
        free=lambda _capsule: None,
        sender=lambda _request: SimpleNamespace(wants=None),
        lanes=lambda _sender: Lanes(),
        working=lambda _migration: contextlib.nullcontext(),
        departures={},
    )
    made: Any = SourceHandlers(capsules, registry, None)  # type: ignore[arg-type]
    made._breaks = lambda _resident: []
    return made  # type: ignore[no-any-return]


def precopy(source: SourceHandlers) -> list[messages.Phase]:
    """The phases as the orchestrator lists them; it sent the request half a second after the
    migration began."""
    request = StartPrecopy("m1", "gpt/0", "h2", "tcp://h2", deadline=60.0)

    async def asked() -> list[messages.Phase]:
        times = Timeline(began=time.monotonic() - 0.5)
        since = time.monotonic()
        times.add((await source.precopy(request)).phases, since)
        return times.phases

    return asyncio.run(asked())


def test_choosing_the_way_is_a_phase_before_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, files = precopy(source(monkeypatch, ""))
    assert (choose.name, files.name) == ("choose", "files ahead")
    assert choose.seconds >= MEASURED_S
    assert not choose.frozen
    assert choose.detail == "the link takes 2.50 GB/s"
    assert choose.start == pytest.approx(0.5, abs=0.1)
    assert files.start >= choose.start + choose.seconds
    assert files.start - (choose.start + choose.seconds) < 0.1, "no time is left unaccounted"


def test_a_full_dump_has_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    (files,) = precopy(source(monkeypatch, "the kernel is too old"))
    assert files.name == "files ahead"
    assert files.start == pytest.approx(0.5, abs=0.1)
