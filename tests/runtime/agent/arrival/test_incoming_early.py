# SPDX-License-Identifier: Apache-2.0
"""A destination that has a CRIU which was started before the image came: it restores by that one,
or, where that is of no use, by a fresh one; and says how. CRIU, tree and memory are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from incoming_scene import NO_CRIU, Scene, scene

from liveshift.criu_glue.images import pids
from liveshift.criu_glue.memory.prefill.prefill import LEAST
from liveshift.errors import StepFailed
from liveshift.runtime.agent.arrival import memory_ahead
from liveshift.runtime.model.stopwatch import Stopwatch

__all__ = ["scene"]

DEADLINE_S = 100.0
MB = 10**6


class Early:
    """Stands in for EarlyCriu: has ``bytes`` of the memory in place."""

    def __init__(self, *given: object) -> None:
        self.given = given
        self.why = self.lost = ""
        self.bytes, self.placing, self.plan = 3 * MB, True, "the plan"
        self.useful = True
        self.done: list[str] = []

    def begin(self) -> None:
        self.done.append("begin")

    def halt(self) -> None:
        self.done.append("halt")

    def prepare(self) -> bool:
        self.done.append(f"prepare{self.why and f' although {self.why}'}")
        if not self.useful or self.why:
            self.why = self.why or "nothing was put in place"
            return False
        return True

    def close(self) -> None:
        self.done.append("close")


class Restores:
    """Of the scene's capsule, with 4 MB of memory, of which an early CRIU has 3."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scene, self.here = scene, scene.here
        self.early = Early()
        self.here._ahead._early = self.early
        self.store: Any = SimpleNamespace(
            lent=False, size=4 * MB, frees_after_copy=False, lost=0, incarnations=list
        )
        self.here.inbox.memory = self.store
        self.fails: list[str] = []  # the next attempts, by what is wrong
        self.takes_s = 0.0
        self.now = 1000.0
        self.tries: list[dict[str, Any]] = []
        self.engines: list[Any] = []
        self.in_reach: list[int] = []
        self.asked: list[tuple[object, ...]] = []
        self.left = 1 << 40
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(memory_ahead, "time", clock)
        monkeypatch.setattr(memory_ahead, "FillEngine", self.engine)
        monkeypatch.setattr(memory_ahead, "memory_left", lambda: self.left)
        monkeypatch.setattr(self.here._restored.tree, "bring_up", self.bring_up)
        monkeypatch.setattr(pids, "limit", lambda: 32768)
        monkeypatch.setattr(pids, "place", self.place)
        monkeypatch.setattr(pids, "of_image", lambda images: {1001, 1234})
        monkeypatch.setattr(pids, "within_reach", self.within_reach)

    def ask(self, *what: object) -> None:
        self.asked.append(what)

    def place(self, ids: object, end: object) -> int:
        self.ask(ids, end)
        return 300

    def within_reach(self, last: int, end: int, ids: set[int]) -> list[int]:
        self.ask(last, end, ids)
        return self.in_reach

    def engine(self, images: Path, store: object, **how: Any) -> Any:
        assert (images, store) == (self.here.images, self.store)
        placed = self.early.bytes if "plan" in how else 0
        seen = SimpleNamespace(bytes=self.store.size - placed, preplaced=placed)
        self.engines.append(SimpleNamespace(seen=lambda: seen, how=how))
        return self.engines[-1]

    def bring_up(self, criu: object, pipes: object, deadline_s: float, **how: Any) -> None:
        self.early.done.append("restore" if "early" in how else "restore by a fresh one")
        self.tries.append(how | {"pipes": pipes, "deadline_s": deadline_s})
        self.now += self.takes_s
        if self.fails:
            raise StepFailed("restore", self.fails.pop(0))

    def run(self) -> Any:
        """Bring it up; the account of the restore."""
        watch = Stopwatch()
        self.here.bring_up(NO_CRIU, watch, DEADLINE_S)
        return next(phase for phase in watch.phases if phase.name == "restore")


@pytest.fixture
def restores(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Restores:
    return Restores(scene, monkeypatch)


def test_one_is_started_when_the_first_memory_comes(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_ahead, "EarlyCriu", Early)
    criu, store = object(), object()
    here = scene.make(criu)
    assert here.placed == (0, False)
    here.inbox.ahead.begin(store, trains=True)
    early = here._ahead._early
    assert early.given == (criu, scene.resident.sandbox, here.images, store)
    assert early.done == ["begin"]
    assert here.placed == (3 * MB, True)
    here.inbox.ahead.halt()
    assert early.done == ["begin", "halt"]
    assert here.inbox.ahead.lost == ""
    early.lost = "it has ended"
    assert here.inbox.ahead.lost == "it has ended", "its source is not to promise then"


def test_it_restores_what_it_has_in_place(restores: Restores) -> None:
    told = restores.run()
    assert restores.early.done == ["prepare", "restore", "close"]
    assert restores.tries == [
        {
            "stopped": False,
            "fill": restores.engines[0],
            "early": restores.early,
            "epoll": [],
            "pipes": {7: 1},
            "deadline_s": DEADLINE_S,
        }
    ]
    assert restores.engines[0].how == {"plan": "the plan", "free_after_copy": False}
    assert told.bytes == 5 + 4 * MB
    assert told.detail == "3.00 MB were in place"
    assert restores.here.placed == (0, False), "it is the tree's now"


def test_what_is_in_place_already_needs_no_memory_twice(restores: Restores) -> None:
    """Only the rest is put into the tree while the store has it."""
    restores.left = LEAST + MB
    restores.run()
    assert restores.engines[0].how["free_after_copy"] is False
    restores.left -= 1
    restores.here._ahead._early = restores.early
    restores.run()
    assert restores.engines[1].how["free_after_copy"] is True


def test_one_that_is_of_no_use_leaves_the_restore_to_a_fresh_one(restores: Restores) -> None:
    restores.early.useful = False
    told = restores.run()
    assert restores.early.done == ["prepare", "close", "restore by a fresh one"]
    assert restores.engines[0].how == {"free_after_copy": False}
    assert restores.tries[0]["fill"] is restores.engines[0]
    assert told.detail == "all was filled in now: nothing was put in place"


def test_a_restore_without_an_early_criu_has_no_detail(restores: Restores) -> None:
    restores.here._ahead._early = None
    phase = restores.run()
    assert restores.early.done == ["restore by a fresh one"]
    assert phase.bytes == 5 + 4 * MB
    assert phase.detail == ""


def test_one_that_has_an_id_of_the_tree_is_of_no_use(restores: Restores) -> None:
    """A task got it after the survey by which CRIU's were chosen."""
    restores.in_reach = [1234, 1235]
    why = "CRIU may have id 1234, which a task has got meanwhile"
    assert restores.run().detail == f"all was filled in now: {why}"
    assert restores.early.done == [f"prepare although {why}", "close", "restore by a fresh one"]
    assert restores.asked == [((1001, 1002), 32768), (300, 32768, {1001, 1234})]


def test_what_is_wrong_with_it_already_is_what_is_told(restores: Restores) -> None:
    restores.early.why = "it has ended"
    restores.in_reach = [1234]
    assert restores.run().detail == "all was filled in now: it has ended"
    assert restores.asked == []


def test_where_its_restore_fails_a_fresh_one_has_the_time_that_is_left(restores: Restores) -> None:
    restores.fails, restores.takes_s = ["it broke off"], 30.0
    told = restores.run()
    assert restores.early.done == ["prepare", "restore", "close", "restore by a fresh one"]
    assert [each["deadline_s"] for each in restores.tries] == [DEADLINE_S, DEADLINE_S - 30]
    assert [each["fill"] for each in restores.tries] == restores.engines
    assert told.bytes == 5 + 4 * MB
    assert "it broke off" in told.detail
    assert "were in place" not in told.detail


def test_where_both_fail_so_does_the_attempt_and_the_next_has_no_early_one(
    restores: Restores,
) -> None:
    restores.fails = ["it broke off", "so did this"]
    with pytest.raises(StepFailed, match="so did this"):
        restores.run()
    restores.here.fail(8, "so did this")
    restores.run()
    assert restores.early.done[-2:] == ["restore by a fresh one"] * 2
    assert restores.early.done.count("close") == 1


def test_without_memory_in_pages_an_early_one_is_not_used(restores: Restores) -> None:
    restores.here.inbox.memory = None
    told = restores.run()
    assert restores.early.done == ["restore by a fresh one"]
    assert restores.tries[0]["fill"] is None
    assert (told.bytes, told.detail) == (5, "")


@pytest.mark.parametrize("early", [False, True])
def test_a_tree_whose_device_state_has_still_to_come_is_stopped(
    restores: Restores, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    restores.scene.with_devices(monkeypatch)
    restores.early.useful = early
    restores.run()
    assert [each["stopped"] for each in restores.tries] == [True]
