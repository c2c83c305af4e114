# SPDX-License-Identifier: Apache-2.0
"""Every way in which a step of a migration can fail at its source, phase by phase: what was done is
undone, and nothing goes on after the promise. CRIU, wire, network and devices are stand-ins."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from outgoing_scene import LOCKED, NO_CRIU, OPENED, PREPARED, Scene, scene

from liveshift.errors import LiveshiftError, Refused, StepFailed
from liveshift.runtime.agent.departure import (
    outgoing_memory,
    outgoing_migration,
    wire_dump,
)
from liveshift.runtime.agent.departure.outgoing_memory import OutgoingMemory, OutgoingWire
from liveshift.runtime.agent.departure.outgoing_migration import OutgoingMigration
from liveshift.runtime.agent.departure.outgoing_note import has_promised, write_promise
from liveshift.runtime.agent.departure.outgoing_phase import ALLOWED, OutgoingPhase
from liveshift.runtime.model import link_rates
from liveshift.runtime.model.stopwatch import Stopwatch

__all__ = ["scene"]

UNDONE = ["thaw", OPENED]


def phase(outgoing: OutgoingMigration) -> OutgoingPhase:
    """Read again: a type checker takes an attribute for what the last assertion found."""
    return outgoing.phase


class Devices:
    """CUDA processes that note what happens to them; ``save`` and ``bring_back`` may fail."""

    saved = ()

    def __init__(self, scene: Scene) -> None:
        self.save = scene.note("devices saved")
        self.bring_back = scene.note("devices back")
        self.drop = scene.note("devices dropped")


def with_devices(scene: Scene) -> None:
    devices: Any = Devices(scene)
    scene.outgoing._frozen.devices = devices


def with_memory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Memory went ahead; its rounds, lanes and final dirty set are stand-ins."""
    memory: Any = scene.outgoing._memory
    memory._rounds = SimpleNamespace(
        stop=scene.note("rounds stopped"),
        close=lambda: None,
        cancel=lambda: None,
        chosen=None,
        began=True,
    )
    end = scene.note("lanes ended")
    memory._lanes = SimpleNamespace(until=0.0, bytes=0, device_bytes=[], end=lambda: end() or {})
    finish = scene.note("final set sent")
    final_set = SimpleNamespace(
        page_filter=None,
        check=lambda: None,
        finish=lambda: finish() or SimpleNamespace(sent_bytes=1),
        stop=scene.note("final set stopped"),
        describe=lambda: "",
    )
    monkeypatch.setattr(outgoing_memory, "PageFilter", lambda _: object())
    monkeypatch.setattr(outgoing_memory, "FinalDirtySet", lambda *_: final_set)
    return memory


# ---- the pre-copy ------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [PREPARED, "all is there"])
def test_a_precopy_that_fails_leaves_the_job_as_it_was(scene: Scene, fails: str) -> None:
    scene.fails = fails
    scene.outgoing._files._trees = []
    with pytest.raises(StepFailed, match=fails):
        scene.precopy()
    assert phase(scene.outgoing) is OutgoingPhase.PRECOPYING
    scene.fails, scene.done = "", []
    scene.outgoing.thaw()
    assert scene.done == ["thaw", "output closed", "wire closed"]
    assert phase(scene.outgoing) is OutgoingPhase.RETURNED


class Link:
    """Lanes whose measuring takes until the test says so."""

    until = float("inf")
    bytes, device_bytes = 0, ()

    def __init__(self, fails: Exception | None = None) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.closed = False
        self._fails = fails

    def measure(self) -> float:
        self.begun.set()
        assert self.may_end.wait(10)
        if self._fails:
            raise self._fails
        return 1e9

    def close(self) -> None:
        self.closed = True


class Rounds:
    """The rounds that are made once the link is measured."""

    chosen = None

    def __init__(self, *_: object) -> None:
        self.cancelled = self.paused = False
        self.sooner: list[float] = []

    def cancel(self) -> None:
        self.cancelled = True

    def pause(self) -> None:
        self.paused = True

    def end_sooner(self, seconds: float) -> None:
        self.sooner.append(seconds)


def measuring(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    link: Link,
    *,
    sooner: float = 0.0,
    given_up: bool = False,
) -> tuple[OutgoingMemory, threading.Thread, list[Exception]]:
    """The memory of a migration whose link is just being measured, in a thread. ``given_up``: that
    came before."""
    monkeypatch.setattr(outgoing_memory, "full_dump_because", lambda *_: "")
    monkeypatch.setattr(outgoing_memory, "PrecopyRounds", Rounds)
    monkeypatch.setattr(outgoing_memory, "choose_way", lambda *_: None)
    monkeypatch.setattr(link_rates, "keep", lambda *_: None)
    scene.factory.host = "h0"
    scene.factory.cluster = SimpleNamespace(precopy=None, paths=SimpleNamespace(run=None))
    scene.wire.wants = None
    lanes: Any = link
    wire = OutgoingWire(scene.wire, lambda _sender: lanes, lambda _report: None)
    memory = OutgoingMemory(scene.resident, scene.factory, wire)
    request: Any = SimpleNamespace(
        full_dump="", sooner=sooner, destination="h1", migration="m1", plan=None
    )
    if given_up:
        memory.give_up()
    errors: list[Exception] = []

    def begin() -> None:
        try:
            memory.begin(request, Stopwatch())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    assert link.begun.wait(10)
    return memory, thread, errors


@pytest.mark.parametrize("paused", [False, True])
def test_what_comes_while_the_link_is_measured_is_not_lost(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    link = Link()
    memory, thread, errors = measuring(scene, monkeypatch, link)
    memory.end_sooner(60.0)
    memory.end_sooner(5.0)
    memory.cancel()
    memory.pause()
    memory.resume()
    if paused:
        memory.pause()
    memory.give_up()
    assert link.until == 0.0
    link.may_end.set()
    thread.join(10)
    rounds: Any = memory._rounds
    assert (errors, rounds.cancelled, rounds.paused) == ([], True, paused)
    assert [0 < seconds <= 5.0 for seconds in rounds.sooner] == [True]


def test_the_rate_of_the_link_is_kept_and_the_rounds_end_as_the_request_says(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, kept = Link(), list[tuple[object, ...]]()
    memory, thread, errors = measuring(scene, monkeypatch, link, sooner=50.0)
    monkeypatch.setattr(link_rates, "keep", lambda *which: kept.append(which))
    link.may_end.set()
    thread.join(10)
    rounds: Any = memory._rounds
    assert (errors, kept) == ([], [(None, "h1", 1e9)])
    assert [40 < seconds <= 50.0 for seconds in rounds.sooner] == [True]


def test_lanes_that_open_after_a_migration_was_given_up_wait_for_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link()
    _, thread, _ = measuring(scene, monkeypatch, link, given_up=True)
    assert link.until == 0.0
    link.may_end.set()
    thread.join(10)


def test_a_link_that_cannot_be_measured_is_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(StepFailed("ship", "h1 is silent"))
    memory, thread, errors = measuring(scene, monkeypatch, link)
    link.may_end.set()
    thread.join(10)
    assert [str(error) for error in errors] == ["ship: h1 is silent"]
    assert memory._rounds is None
    memory.close()
    assert link.closed


# ---- the freeze, before the promise ------------------------------------------------------------

BEFORE_PROMISE = {
    "rounds stopped": ["thaw"],
    "devices saved": ["thaw"],
    LOCKED: ["thaw"],
    "dump": UNDONE,
    "output": UNDONE,
    "final set sent": UNDONE,
    "all is there": UNDONE,
    "remembered": UNDONE,
    "pin": UNDONE,
}
"""What fails, and how tree and network are let go."""


@pytest.mark.parametrize(
    "error", [StepFailed("x", "y"), OSError(28, "no space"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("fails", BEFORE_PROMISE)
def test_what_fails_before_the_promise_lets_the_capsule_go_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fails: str, error: BaseException
) -> None:
    """CRIU that is killed, a helper that refuses, a destination that is silent, a full disk."""
    with_devices(scene)
    with_memory(scene, monkeypatch)
    scene.fails, scene.error = fails, lambda _: error
    with pytest.raises(type(error)):
        scene.outgoing.freeze(NO_CRIU, 10.0)
    at = scene.done.index(fails)
    after = [step for step in scene.done[at + 1 :] if step != "final set stopped"]
    assert after == [*BEFORE_PROMISE[fails], "devices back", "output closed", "wire closed"]
    assert ("final set stopped" in scene.done) is ("dump" in scene.done), "no thread goes on"
    assert (scene.outgoing.phase, scene.outgoing.promised) == (OutgoingPhase.RETURNED, False)
    assert not scene.resident.still
    assert not scene.images.exists()


def test_a_promise_that_cannot_be_written_is_none(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_images: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(outgoing_migration, "write_promise", full)
    with pytest.raises(OSError, match="no space"):
        scene.outgoing.freeze(NO_CRIU, 10.0)
    assert scene.steps[-3:] == ["pin", *UNDONE]
    assert phase(scene.outgoing) is OutgoingPhase.RETURNED


def test_a_note_that_cannot_be_written_stops_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a restarted agent would not know of the freeze."""
    with_devices(scene)

    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(wire_dump, "write_note", full)
    with pytest.raises(OSError, match="no space"):
        scene.outgoing.freeze(NO_CRIU, 10.0)
    assert scene.steps == ["thaw", "devices back"]


def test_device_memory_that_does_not_arrive_ends_the_freeze(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_devices(scene)
    pump = SimpleNamespace(
        bytes=9, finish=scene.note("device memory sent"), stop=scene.note("pump stopped")
    )
    monkeypatch.setattr(wire_dump, "Pump", lambda *_: pump)
    scene.fails = "device memory sent"
    assert scene.freeze()[-4:] == ["pump stopped", *UNDONE, "devices back"]
    assert phase(scene.outgoing) is OutgoingPhase.RETURNED


@pytest.mark.parametrize("fails", ["thaw", OPENED, "devices back"])
def test_a_thaw_that_fails_is_tried_again(scene: Scene, fails: str) -> None:
    """CRIU that does not let go, a network that stays locked, a helper that fell silent."""
    with_devices(scene)
    scene.fails = {"dump", fails}
    with pytest.raises(StepFailed, match=f"{fails} failed"):
        scene.outgoing.freeze(NO_CRIU, 10.0)
    assert phase(scene.outgoing) is OutgoingPhase.THAWING
    assert OPENED in scene.done, "whatever failed"
    assert scene.resident.still is (fails != "devices back")
    with pytest.raises(Refused, match="it is thawing"):
        scene.outgoing.freeze(NO_CRIU, 10.0)
    scene.fails, scene.done = "", []
    scene.outgoing.thaw()
    again = [OPENED] if fails == OPENED else []  # it is opened once
    assert scene.steps == ["thaw", *again, "devices back"]
    assert phase(scene.outgoing) is OutgoingPhase.RETURNED
    assert not scene.resident.still


def test_a_capsule_that_was_killed_while_it_was_frozen_has_no_network(scene: Scene) -> None:
    with_devices(scene)
    kill, dump = scene.note("dump"), scene.outgoing._frozen.tree

    def killed(*_: object) -> None:
        scene.alive = False
        kill()

    stand_in: Any = dump
    stand_in.dump = killed
    scene.fails = "dump"
    assert scene.freeze()[-2:] == ["thaw", "devices dropped"]
    assert phase(scene.outgoing) is OutgoingPhase.RETURNED


def test_a_freeze_that_comes_too_late_is_refused_and_changes_nothing(scene: Scene) -> None:
    scene.fails = "dump"
    scene.freeze()
    done = list(scene.done)
    for late in (scene.outgoing.check_may_freeze, lambda: scene.outgoing.freeze(NO_CRIU, 10.0)):
        with pytest.raises(Refused, match="m1 cannot freeze its capsule: it is returned"):
            late()
    assert scene.done == done


# ---- after the promise -------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["lanes ended", "manifest", "all is there at last"])
def test_what_fails_after_the_promise_leaves_the_tree_held(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The image may be complete, though the answer was lost."""
    with_memory(scene, monkeypatch)
    finish = scene.note("all is there at last")
    scene.wire.finish = lambda: finish() if has_promised(scene.images) else None
    scene.fails = fails
    with pytest.raises(StepFailed, match=fails):
        scene.outgoing.freeze(NO_CRIU, 10.0)
    assert (scene.outgoing.phase, scene.outgoing.promised) == (OutgoingPhase.PROMISED, True)
    assert not any(step.startswith(("thaw", OPENED)) for step in scene.done)
    assert scene.resident.still


@pytest.mark.parametrize("fails", ["removed", "release", "devices dropped"])
def test_a_removal_that_fails_is_tried_again(scene: Scene, fails: str) -> None:
    with_devices(scene)
    scene.freeze()
    scene.fails = fails
    with pytest.raises(StepFailed, match=f"{fails} failed"):
        scene.outgoing.finish()
    assert phase(scene.outgoing) is OutgoingPhase.FINISHING
    assert scene.resident.leaving
    assert scene.images.exists(), "a restarted agent takes it up"
    scene.fails = ""
    scene.outgoing.finish()
    assert phase(scene.outgoing) is OutgoingPhase.MOVED
    assert not scene.images.exists()


def test_after_a_promise_a_ruling_may_thaw_and_later_remove(scene: Scene) -> None:
    scene.freeze()
    scene.fails = "thaw"
    with pytest.raises(StepFailed, match="thaw failed"):
        scene.outgoing.thaw()
    assert (scene.outgoing.phase, scene.outgoing.promised) == (OutgoingPhase.THAWING, True)
    scene.fails = ""
    scene.outgoing.finish()
    assert phase(scene.outgoing) is OutgoingPhase.MOVED


# ---- after a restart of the agent --------------------------------------------------------------


def recovered(scene: Scene, devices: Any = None) -> OutgoingMigration:
    here = OutgoingMigration.recover(
        "m1", scene.resident, scene.factory, ["GPU-1"], lambda: devices
    )
    scene.equip(here)
    return here


@pytest.mark.parametrize("promised", [False, True])
def test_a_restarted_agent_finds_it_where_it_was(scene: Scene, promised: bool) -> None:
    scene.images.mkdir()
    if promised:
        write_promise(scene.images)
    here = recovered(scene)
    assert phase(here) is (OutgoingPhase.PROMISED if promised else OutgoingPhase.FREEZING)
    with pytest.raises(Refused, match="held frozen already" if promised else "it is freezing"):
        here.freeze(NO_CRIU, 10.0)
    here.abandon()
    here.gates_close()
    here.gates_open()
    here.end_sooner(1.0)
    (here.finish if promised else here.thaw)()
    assert phase(here) is (OutgoingPhase.MOVED if promised else OutgoingPhase.RETURNED)
    assert not scene.images.exists()


def test_a_restarted_agent_waits_for_a_helper_that_comes_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "liveshift.runtime.agent.departure.frozen_capsule.has_cuda", lambda _resident: True
    )
    found: list[Any] = [None, Devices(scene)]
    here = OutgoingMigration.recover("m1", scene.resident, scene.factory, [], lambda: found.pop(0))
    scene.equip(here)
    with pytest.raises(LiveshiftError, match="can't be reached"):
        here.thaw()
    assert phase(here) is OutgoingPhase.THAWING
    here.thaw()
    assert scene.steps[-1] == "devices back"
    assert phase(here) is OutgoingPhase.RETURNED


# ---- the table itself --------------------------------------------------------------------------


def test_no_phase_follows_another_that_the_table_does_not_name(scene: Scene) -> None:
    for now, then in itertools.product(OutgoingPhase, OutgoingPhase):
        scene.outgoing.phase = now
        if then is now or then in ALLOWED[now]:
            scene.outgoing._enter(then)
        else:
            with pytest.raises(AssertionError, match="may not become"):
                scene.outgoing._enter(then)


def test_a_tree_that_was_promised_is_never_frozen_or_precopied_again() -> None:
    def after(phase: OutgoingPhase) -> set[OutgoingPhase]:
        found: set[OutgoingPhase] = set()
        new = {phase}
        while new:
            found |= new
            new = {then for now in new for then in ALLOWED[now]} - found
        return found

    assert not after(OutgoingPhase.PROMISED) & {OutgoingPhase.PRECOPYING, OutgoingPhase.FREEZING}
    assert after(OutgoingPhase.FINISHING) == {OutgoingPhase.FINISHING, OutgoingPhase.MOVED}
