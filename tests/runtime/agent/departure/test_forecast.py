# SPDX-License-Identifier: Apache-2.0
"""When the memory of a capsule can go ahead: processes that share it copy on write would each have
a copy of their own afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.criu_glue.memory.source.tracker import MemoryTracker
from liveshift.criu_glue.survey.found import Footprint
from liveshift.runtime.agent.departure import forecast
from liveshift.runtime.agent.departure.forecast import (
    forecast_memory,
    full_dump_because,
    room_for_copies,
)
from liveshift.runtime.agent.host import host_facts

MB = 1 << 20
RESIDENT: Any = SimpleNamespace(sandbox=None)
SETTINGS: Any = SimpleNamespace(enabled=True)


def because(
    monkeypatch: pytest.MonkeyPatch, private: int, shared: int, room: int | None = None
) -> str:
    size = Footprint(private * MB, 0, 3, 9, 100, (private + shared) * MB, 0)
    monkeypatch.setattr(forecast, "footprint", lambda _: size)
    monkeypatch.setattr(MemoryTracker, "probe", lambda: "")
    if room is None:  # a migration
        return full_dump_because("h0", RESIDENT, SETTINGS)
    return forecast_memory("h0", RESIDENT, SETTINGS, False, room * MB)[2]


@pytest.mark.parametrize(("private", "shared"), [(400, 200), (4000, 900), (900, 0)])
def test_a_little_or_a_small_part_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, private: int, shared: int
) -> None:
    assert because(monkeypatch, private, shared) == ""


def test_a_migration_takes_a_full_dump_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "share 419 MB copy on write" in because(monkeypatch, 500, 400)


@pytest.mark.parametrize(("room", "fits"), [(0, False), (300, False), (399, False), (400, True)])
def test_a_snapshot_goes_ahead_if_the_host_has_memory_for_the_copies(
    monkeypatch: pytest.MonkeyPatch, room: int, fits: bool
) -> None:
    assert (because(monkeypatch, 500, 400, room) == "") is fits


def test_a_host_without_memory_to_spare_is_no_worse_than_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert because(monkeypatch, 400, 200, -5000) == ""


def test_a_copy_that_gives_way_takes_none_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """136 GB are available before a copy of 90 GB, and processes share 24 GB."""
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _kept: 110_000 * MB)
    before = room_for_copies()
    assert because(monkeypatch, 90_000, 24_000, before // MB) == ""
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _kept: 20_000 * MB)
    assert room_for_copies(90_000 * MB) == before
