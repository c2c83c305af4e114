# SPDX-License-Identifier: Apache-2.0
"""A source does not hold the job for a holder that answers nothing. Stand-ins as in
test_outgoing_snapshot.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from snapshot_scene import SnapshotScene, snapshots

from liveshift.errors import StepFailed
from liveshift.runtime.model import link_rates
from liveshift.runtime.wire import CHUNK

__all__ = ["snapshots"]


@pytest.mark.parametrize(
    ("rate", "kept", "limit"),
    [
        (None, None, 1.0),
        (0.0, None, 1.0),
        (CHUNK / 0.5, None, 3.5),
        (0.0, CHUNK / 0.5, 3.5),
        (CHUNK / 0.5, CHUNK / 9.0, 3.5),
    ],
)
def test_the_pause_does_not_last_for_a_silent_holder(
    snapshots: SnapshotScene, rate: float | None, kept: float | None, limit: float
) -> None:
    """Over a slow link a chunk may take its time, and all lanes share it. A small increment does
    not show how slow the link is, but the last move to the holder did."""
    scene = snapshots
    if kept is not None:
        link_rates.keep(scene.images.parent, "h2", kept)
    memory: Any = scene.memory
    memory.lanes = None if rate is None else SimpleNamespace(rate=rate)
    scene.ahead()
    assert scene.wire.silence.limit == float("inf"), "the job trains"
    scene.lock()
    assert scene.wire.silence.limit == limit
    memory.lanes = None


def test_an_ordered_snapshot_waits_for_a_silent_holder(snapshots: SnapshotScene) -> None:
    """The order fails with it, and a job that is suspended stops anyway."""
    scene = snapshots
    scene.snapshot._ordered = True
    scene.wire.silence.longest = 3.0
    scene.ahead()
    scene.lock()
    assert (scene.wire.silence.limit, scene.wire.silence.longest) == (float("inf"), 0.0)


def test_how_long_a_holder_was_silent_counts_for_the_next_pause(snapshots: SnapshotScene) -> None:
    scene = snapshots
    scene.ahead()
    scene.lock()
    scene.wire.silence.longest = 0.4
    scene.dump()
    scene.snapshot.thaw()
    scene.ends()
    assert scene.learnt == [(0.4, False, 10.0)]


@pytest.mark.parametrize("broken", [True, False])
def test_so_does_a_silence_that_has_ended_it(snapshots: SnapshotScene, broken: bool) -> None:
    """But nothing is learnt from another failure."""
    scene = snapshots
    scene.ahead()
    scene.lock()
    scene.wire.silence.broken = broken
    scene.fails = "all is there"
    with pytest.raises(StepFailed):
        scene.dump()
    scene.fails = ""
    scene.ends()
    assert scene.learnt == ([(0.0, True, 10.0)] if broken else [])
    assert scene.goes_on()
