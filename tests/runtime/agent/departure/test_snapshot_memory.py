# SPDX-License-Identifier: Apache-2.0
"""The memory of a snapshot: single rounds with a tracker that goes on afterwards. Tracker and lanes
are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from outgoing_scene import Scene, scene

from liveshift.criu_glue.memory.source.pulling import PullStopped
from liveshift.criu_glue.memory.source.tracker import TrackedRound
from liveshift.runtime.agent.departure.outgoing_memory import OutgoingMemory, OutgoingWire
from liveshift.runtime.agent.host.usual_rate import UsualRate
from liveshift.runtime.config.cluster import PrecopySettings
from liveshift.runtime.messages import Progressed
from liveshift.runtime.model.stopwatch import Lap, Stopwatch

__all__ = ["scene"]

DIGEST = bytes(range(16))


class Lanes:
    """They have no ``measure``: the link of a snapshot is not measured."""

    until = float("inf")

    def __init__(self) -> None:
        self.bytes, self.device_bytes = 0, ()
        self.closed = False

    def finish(self) -> None:
        pass

    def pages(self, chunk: memoryview, release: Callable[[], None]) -> None:
        self.bytes += len(chunk)
        release()

    def close(self) -> None:
        self.closed = True


class Lent:
    """Finds one page in each round."""

    def __init__(self) -> None:
        self.rounds = 0
        self.closed = False
        self.stopped: Callable[[], bool] = lambda: False

    def round(self, sink: Any, throttle: Any, listed: Callable[[int], None]) -> TrackedRound:
        if self.stopped():
            raise PullStopped
        listed(4096)
        sink(memoryview(bytes(100)), lambda: None)
        self.rounds += 1
        return TrackedRound(4096, 100, 1, {})

    def digest(self) -> bytes:
        return DIGEST

    def close(self) -> None:
        self.closed = True


class Snapshot:
    """The memory of gpt/1, on its way as s17.1."""

    def __init__(self, scene: Scene) -> None:
        self.lanes, self.lent = Lanes(), Lent()
        self.reports: list[Progressed] = []
        scene.resident.collectives = lambda: 0
        scene.resident.rate = scene.resident.computes = UsualRate()
        scene.resident.run_time = SimpleNamespace(progress=lambda: 0)
        scene.factory.cluster = SimpleNamespace(precopy=PrecopySettings())
        scene.wire.wants = list
        lanes: Any = self.lanes
        lent: Any = self.lent
        wire = OutgoingWire(scene.wire, lambda _sender: lanes, self.reports.append)
        self.memory = OutgoingMemory(scene.resident, scene.factory, wire, lent)

    def send_ahead(self) -> Lap:
        with Stopwatch().phase("pre-copy") as lap:
            self.memory.send_ahead(float("inf"), lap)
        return lap


@pytest.fixture
def snapshot(scene: Scene) -> Snapshot:
    return Snapshot(scene)


def test_each_time_memory_is_sent_ahead_is_one_round(snapshot: Snapshot) -> None:
    snapshot.memory.begin_snapshot("s17.1")
    first = snapshot.send_ahead()
    assert (snapshot.lent.rounds, first.bytes, snapshot.memory.sent) == (1, 100, 100)
    assert first.detail.startswith("1 round, ")
    snapshot.send_ahead()
    assert (snapshot.lent.rounds, snapshot.memory.sent) == (2, 200)
    assert {report.migration for report in snapshot.reports} == {"s17.1"}
    assert snapshot.memory.chosen is None


def test_the_tracker_goes_on_when_the_snapshot_has_ended(snapshot: Snapshot) -> None:
    snapshot.memory.begin_snapshot("s17.1")
    snapshot.send_ahead()
    snapshot.memory.stop_rounds(Stopwatch())
    assert snapshot.lent.stopped(), "no round begins any more"
    assert snapshot.memory.digest() == DIGEST
    snapshot.memory.close()
    assert (snapshot.lanes.closed, snapshot.lent.closed) == (True, False)


def test_what_was_asked_before_it_began_is_not_lost(snapshot: Snapshot) -> None:
    snapshot.memory.cancel()
    snapshot.memory.give_up()
    snapshot.memory.begin_snapshot("s17.1")
    assert snapshot.lanes.until == 0.0
    snapshot.send_ahead()
    assert snapshot.lent.rounds == 0


def test_a_deadline_that_came_before_it_began_ends_the_second_round(snapshot: Snapshot) -> None:
    snapshot.memory.end_sooner(0.0)
    snapshot.memory.pause()
    snapshot.memory.begin_snapshot("s17.1")
    snapshot.send_ahead()
    assert snapshot.lent.rounds == 1, "the first one is always made whole"
    snapshot.send_ahead()
    assert snapshot.lent.rounds == 1
