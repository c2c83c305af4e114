# SPDX-License-Identifier: Apache-2.0
"""Measuring the link and choosing the way is a phase of a migration, and those after it are shown
where they were."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from outgoing_scene import NO_CRIU, Scene, scene

from liveshift.criu_glue.network import network_lock
from liveshift.runtime.agent.departure import outgoing_memory
from liveshift.runtime.agent.departure.outgoing_memory import OutgoingMemory, OutgoingWire
from liveshift.runtime.messages import Phase
from liveshift.runtime.model import link_rates
from liveshift.runtime.model.timeline import Timeline

__all__ = ["scene"]

MEASURED_S, CHOSEN_S = 0.2, 0.1

Moments = dict[str, float]
"""When the migration began and the stand-ins were called (monotonic seconds)."""


class Link:
    until = float("inf")
    bytes, device_bytes = 0, ()

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def measure(self) -> float:
        self._moments["measure"] = time.monotonic()
        time.sleep(MEASURED_S)
        return 2.5e9


class Rounds:
    """They send nothing."""

    chosen = None
    on_idle_cores = False

    def __init__(self, *_: object) -> None:
        pass

    def run(self, _until: float) -> Any:
        return SimpleNamespace(sent=30)

    def iterate_until_freeze(self) -> None:
        pass


@pytest.fixture
def moments() -> Moments:
    return {}


@pytest.fixture
def leaving(scene: Scene, moments: Moments, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Its memory can go ahead."""
    monkeypatch.setattr(outgoing_memory, "full_dump_because", lambda *_: "")
    monkeypatch.setattr(outgoing_memory, "PrecopyRounds", Rounds)
    monkeypatch.setattr(outgoing_memory, "choose_way", lambda *_: time.sleep(CHOSEN_S))
    monkeypatch.setattr(outgoing_memory, "describe_rounds", lambda _: "1 round")
    monkeypatch.setattr(link_rates, "keep", lambda *_: None)
    scene.factory.host = "h0"
    scene.factory.cluster = SimpleNamespace(precopy=None, paths=SimpleNamespace(run=None))
    scene.wire.wants, scene.wire.send = None, lambda *_: None
    lanes: Any = Link(moments)
    monkeypatch.setattr(
        network_lock, "prepare_lock", lambda _: moments.update(files=time.monotonic())
    )
    wire = OutgoingWire(scene.wire, lambda _sender: lanes, lambda _report: None)
    outgoing: Any = scene.outgoing
    outgoing._memory = OutgoingMemory(scene.resident, scene.factory, wire)
    return scene


def phases(scene: Scene, moments: Moments, full_dump: str) -> list[Phase]:
    """As the orchestrator lists them; it sent the request half a second after the migration began,
    and the handler needed a moment before it began."""
    request: Any = SimpleNamespace(
        deadline=60.0, full_dump=full_dump, sooner=0.0, destination="h2", migration="m1"
    )
    since = time.monotonic()
    times = Timeline(began=since - 0.5)
    moments["began"] = times.began
    time.sleep(0.05)
    times.add(scene.outgoing.precopy(request, since, NO_CRIU).phases, since)
    return times.phases


def test_choosing_the_way_is_a_phase_before_the_files(leaving: Scene, moments: Moments) -> None:
    choose, files, precopy = phases(leaving, moments, "")
    assert [choose.name, files.name, precopy.name] == ["choose", "files ahead", "pre-copy"]
    assert choose.seconds >= MEASURED_S + CHOSEN_S
    assert not choose.frozen
    assert choose.detail == "the link takes 2.50 GB/s"
    assert 0.55 <= choose.start <= moments["measure"] - moments["began"]
    over = choose.start + choose.seconds
    assert over <= files.start <= moments["files"] - moments["began"]


def test_a_full_dump_has_no_choice(leaving: Scene, moments: Moments) -> None:
    files, precopy = phases(leaving, moments, "the kernel is too old")
    assert [files.name, precopy.name] == ["files ahead", "pre-copy"]
    assert files.start >= 0.55
