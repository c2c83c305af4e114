# SPDX-License-Identifier: Apache-2.0
"""When an agent lowers its weight for a migration, and when it raises it again: the other parts of
a migration are stand-ins. What the weight does is in tests/test_background.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outgoing_scene import Scene, scene

from liveshift import background
from liveshift.runtime.agent.arrival.memory_ahead import MemoryAhead

__all__ = ["scene"]


@pytest.fixture(autouse=True)
def changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The changes of the weight, in their order."""
    noted: list[str] = []
    for name in ("begin", "leave", "end"):
        monkeypatch.setattr(background, name, lambda m, name=name: noted.append(f"{name} {m}"))
    return noted


def memory(*, on_idle_cores: bool) -> Any:
    return SimpleNamespace(
        on_idle_cores=on_idle_cores,
        chosen=None,
        sent=0,
        lanes=None,
        begin=lambda *_: None,
        send_ahead=lambda *_: None,
        page_filter=lambda _images: None,
        stop_rounds=lambda *_: None,
        end_sooner=lambda *_: None,
        send_final_set=lambda *_: None,
        wait_without_end=lambda: None,
        end_streams=dict,
        close=lambda: None,
    )


@pytest.fixture
def leaving(scene: Scene) -> Scene:
    scene.outgoing = scene.make()
    scene.outgoing._files._trees = []
    return scene


def test_a_source_is_low_until_the_freeze(leaving: Scene, changes: list[str]) -> None:
    outgoing: Any = leaving.outgoing
    outgoing._memory = memory(on_idle_cores=True)
    leaving.precopy()
    assert changes == ["begin m1"]
    leaving.freeze()
    assert changes == ["begin m1", "leave m1"]
    outgoing.finish()
    assert changes == ["begin m1", "leave m1", "end m1"]


def test_a_source_that_needs_the_jobs_cores_is_not_low(leaving: Scene, changes: list[str]) -> None:
    outgoing: Any = leaving.outgoing
    outgoing._memory = memory(on_idle_cores=False)
    leaving.precopy()
    assert changes == []


def test_a_deadline_that_comes_meanwhile_ends_it(leaving: Scene, changes: list[str]) -> None:
    outgoing: Any = leaving.outgoing
    outgoing._memory = memory(on_idle_cores=True)
    leaving.precopy()
    outgoing.end_sooner(5.0)
    assert changes == ["begin m1", "leave m1"]


def test_a_move_that_is_given_up_ends_it(leaving: Scene, changes: list[str]) -> None:
    outgoing: Any = leaving.outgoing
    outgoing._memory = memory(on_idle_cores=True)
    leaving.precopy()
    outgoing.thaw()
    assert changes == ["begin m1", "end m1"]


def arriving(*, idle: bool) -> MemoryAhead:
    nothing: Any = None
    reserve: Any = SimpleNamespace(migration="m1")
    return MemoryAhead(nothing, nothing, Path("images"), reserve, idle=idle)


def test_a_destination_with_idle_cores_is_low_until_the_freeze(changes: list[str]) -> None:
    store: Any = None
    ahead = arriving(idle=True)
    ahead.begin(store, trains=True)
    assert changes == ["begin m1"]
    ahead.halt()
    assert changes == ["begin m1", "leave m1"]
    ahead.drop()
    assert changes == ["begin m1", "leave m1", "end m1"]


def test_a_destination_is_not_low_while_a_job_waits_for_pages(changes: list[str]) -> None:
    store: Any = None
    arriving(idle=True).begin(store, trains=False)
    arriving(idle=False).begin(store, trains=True)
    assert changes == []
    late = arriving(idle=True)
    late.halt()  # the images overtook the pages
    late.begin(store, trains=True)
    assert changes == ["leave m1"]
