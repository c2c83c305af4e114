# SPDX-License-Identifier: Apache-2.0
"""Every way in which a step of a migration can fail at its destination, phase by phase: no task is
left, and another attempt may follow. CRIU, tree, devices and orchestrator are stand-ins."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from incoming_scene import NO_CRIU, Scene, scene

from liveshift.errors import LiveshiftError, NotFound, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.agent.arrival import incoming_migration, restore_attempt
from liveshift.runtime.agent.arrival.incoming_note import NOTE
from liveshift.runtime.agent.arrival.incoming_phase import ALLOWED, IncomingPhase
from liveshift.runtime.agent.arrival.restore_attempt import RestoreAttempt
from liveshift.runtime.model.ownership import Ruling

__all__ = ["scene"]

T = TypeVar("T")
LATER = 1
DEVICES = ("stop_at_door", "arrive")
"""The steps that come only with device state."""


def phase_of(incoming: Any) -> IncomingPhase:
    """Read anew: a type checker takes an attribute for what the last assertion found."""
    found: IncomingPhase = incoming.phase
    return found


class Host:
    """Stands in for the host's capsules and for the orchestrator; ``answers`` are its rulings, each
    with how much later than the claim's its epoch is."""

    host = "h1"

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.cluster = scene.factory.cluster
        self.answers: list[LiveshiftError | tuple[Ruling, int]] = [(Ruling.RUN, 0)]
        self.claims: list[messages.Claim] = []
        self.located: list[dict[str, tuple[str, int]]] = []
        self.locate_fails = False

    async def blocking(self, _capsule: str, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    async def locate(self, where: messages.Locate) -> None:
        self.located.append(where.book.where)
        if self.locate_fails:
            raise LiveshiftError("no overlay")

    async def claim(self, claim: messages.Claim) -> messages.Ruled:
        self.claims.append(claim)
        answer = self.answers.pop(0)
        if isinstance(answer, LiveshiftError):
            raise answer
        ruling, later = answer
        return messages.Ruled(ruling.value, claim.epoch + later)

    def restore(self, epoch: int = 9) -> messages.Moved:
        table: Any = self
        attempt = RestoreAttempt(self.scene.here, table, self.claim, NO_CRIU)
        request: Any = SimpleNamespace(capsule="gpt/1", epoch=epoch, deadline=10.0)
        return asyncio.run(attempt.run(request))


@pytest.fixture
def host(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(restore_attempt, "RETRY_S", 0.001)
    return Host(scene)


# ---- one attempt -------------------------------------------------------------------------------


def test_an_attempt_that_succeeds(scene: Scene, host: Host) -> None:
    moved = host.restore()
    assert moved.bytes == 14
    assert [phase.frozen for phase in moved.phases if phase.name == "grant"] == [True]
    assert host.located == [{"10.99.7.2": ("h1", 9)}]
    assert scene.done[-3:] == ["bring_up", "noted", "let_run"]
    assert (scene.here.phase, scene.here.granted) == (IncomingPhase.RUNNING, 9)
    (claim,) = host.claims
    assert (claim.migration, claim.side, claim.epoch, claim.ready) == ("m1", "coming", 9, True)


@pytest.mark.parametrize("error", [StepFailed("restore", "no"), OSError(28, "full")])
@pytest.mark.parametrize(
    "fails",
    [
        *("inbox closed", "reconcile", "prepare", "forget", "mark", "let go on", "bring_up"),
        *DEVICES,
    ],
)
def test_what_fails_before_the_claim_claims_nothing_and_may_be_tried_again(
    scene: Scene,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    error: Exception,
) -> None:
    """A damaged image, a full disk, CRIU that is killed, a helper that refuses."""
    scene.with_devices(monkeypatch)
    scene.fails, scene.error = fails, lambda _: error
    with pytest.raises(type(error)):
        host.restore()
    assert host.claims == []
    assert "let_run" not in scene.done
    assert "noted" not in scene.done
    if fails in DEVICES:
        assert scene.done[-2:] == ["drop", "end"], "no task is left"
    assert phase_of(scene.here) is IncomingPhase.FAILED
    with pytest.raises(StepFailed, match="the attempt under epoch 9 has failed"):
        scene.here.check_may_restore(9)
    scene.here.check_may_restore(10)
    scene.fails = ""
    host.restore(10)
    assert (scene.here.phase, scene.here.granted) == (IncomingPhase.RUNNING, 10)
    assert scene.done.count("reconcile") == (2 if fails == "reconcile" else 1)


def test_an_image_that_is_not_complete_is_not_restored(scene: Scene, host: Host) -> None:
    landed, scene.here.inbox.landed = scene.here.inbox.landed, None
    assert phase_of(scene.here) is IncomingPhase.RECEIVING
    with pytest.raises(StepFailed, match="the image is not complete"):
        host.restore()
    assert phase_of(scene.here) is IncomingPhase.FAILED
    assert "bring_up" not in scene.done
    with pytest.raises(StepFailed, match="the image is not complete"):
        host.restore(10)
    scene.here.inbox.landed = landed
    scene.here.discard()
    assert phase_of(scene.here) is IncomingPhase.DISCARDED


def test_an_agent_that_ends_meanwhile_leaves_a_failed_attempt(scene: Scene, host: Host) -> None:
    scene.fails, scene.error = "bring_up", lambda _: asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        host.restore()
    assert phase_of(scene.here) is IncomingPhase.FAILED


def test_where_both_fail_the_log_has_the_one_that_is_not_raised(
    scene: Scene, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.locate_fails = True
    scene.fails, scene.error = "bring_up", lambda _: StepFailed("restore", "CRIU was killed")
    with pytest.raises(StepFailed, match="CRIU was killed"):
        host.restore()
    assert "locating gpt/1 here: no overlay" in caplog.text


def test_an_address_that_is_entered_after_criu_is_done_is_waited_for(
    scene: Scene, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    locate = host.locate

    async def late(where: messages.Locate) -> None:
        while "bring_up" not in scene.done:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await locate(where)

    monkeypatch.setattr(host, "locate", late)
    host.restore()
    assert host.located == [{"10.99.7.2": ("h1", 9)}]
    assert phase_of(scene.here) is IncomingPhase.RUNNING


@pytest.mark.parametrize("criu_too", [False, True])
def test_an_address_that_cannot_be_entered_leaves_no_task(
    scene: Scene, host: Host, criu_too: bool
) -> None:
    host.locate_fails = True
    scene.fails = "bring_up" if criu_too else ""
    said = "bring_up failed" if criu_too else "its address could not be located here: no overlay"
    with pytest.raises(StepFailed, match=said):
        host.restore()
    assert (scene.done[-1] == "drop") is not criu_too, "CRIU that failed has left none"
    assert host.claims == []
    assert phase_of(scene.here) is IncomingPhase.FAILED


def test_what_the_processes_had_finished_is_remembered_before_they_run(
    scene: Scene, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it the agent sees later that the job makes progress here."""
    monkeypatch.setattr(
        incoming_migration,
        "finished_by_pid",
        lambda _, ids: dict.fromkeys(ids, 13 if "let_run" in scene.done else 12),
    )
    host.restore()
    assert scene.resident.finished == {1001: 12}


# ---- the claim ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answers",
    [
        [Unreachable("the orchestrator is silent"), (Ruling.RUN, 0)],
        [LiveshiftError("a slip"), Unreachable("silent"), (Ruling.RUN, 0)],
        [(Ruling.WAIT, 0), (Ruling.WAIT, -1), (Ruling.RUN, 0)],
    ],
)
def test_it_claims_until_there_is_a_ruling(
    scene: Scene, host: Host, answers: list[LiveshiftError | tuple[Ruling, int]]
) -> None:
    host.answers = answers
    many = len(answers)
    host.restore()
    assert len(host.claims) == many
    assert phase_of(scene.here) is IncomingPhase.RUNNING


@pytest.mark.parametrize("answer", [(Ruling.END, 0), (Ruling.END, LATER), (Ruling.WAIT, LATER)])
@pytest.mark.parametrize("drop_fails", [False, True])
def test_a_tree_that_may_not_run_is_dropped(
    scene: Scene, host: Host, answer: tuple[Ruling, int], drop_fails: bool
) -> None:
    host.answers = [answer]
    scene.fails = "drop" if drop_fails else ""
    said = "drop failed" if drop_fails else "gpt/1 may not run on h1 any more"
    with pytest.raises(StepFailed, match=said):
        host.restore()
    assert scene.done[-1] == "drop"
    assert (scene.here.phase, scene.here.granted) == (IncomingPhase.FAILED, 0)
    assert scene.resident.epoch == 0, "it is not said to run here"


# ---- after the grant ---------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["noted", "let_run"])
def test_a_tree_that_cannot_go_on_after_the_grant_is_dropped_and_said_so(
    scene: Scene, host: Host, fails: str
) -> None:
    """A disk that is full, a network that stays locked, CRIU that was killed."""
    scene.fails = fails
    with pytest.raises(StepFailed, match=f"the tree could not go on: restore: {fails} failed"):
        host.restore()
    assert scene.done[-2:] == ["drop", "unnoted"]
    assert (scene.here.phase, scene.here.granted) == (IncomingPhase.FAILED, 9)
    scene.fails, host.answers = "", [(Ruling.RUN, 0)]
    host.restore(11)
    assert (scene.here.phase, scene.here.granted) == (IncomingPhase.RUNNING, 11)


def test_a_tree_that_runs_though_an_error_came_runs(scene: Scene, host: Host) -> None:
    scene.fails, scene.runs = "let_run", True
    host.restore()
    assert "drop" not in scene.done
    assert phase_of(scene.here) is IncomingPhase.RUNNING


def test_a_helper_that_went_after_the_restore_lets_nothing_run(
    scene: Scene, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.with_devices(monkeypatch)
    scene.fails = "let_run_held"
    with pytest.raises(StepFailed, match="let_run_held failed"):
        host.restore()
    assert scene.done[-3:] == ["drop", "end", "unnoted"]
    assert phase_of(scene.here) is IncomingPhase.FAILED


def test_an_attempt_that_is_cancelled_when_the_tree_just_runs_has_not_failed(
    scene: Scene, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an agent ends: its handler is cancelled, and its thread has just let the tree run."""

    async def cancelled_behind(_capsule: str, work: Callable[[], T]) -> T:
        done = await asyncio.to_thread(work)
        if phase_of(scene.here) is IncomingPhase.RUNNING:
            raise asyncio.CancelledError
        return done

    monkeypatch.setattr(host, "blocking", cancelled_behind)
    with pytest.raises(asyncio.CancelledError):
        host.restore()
    assert phase_of(scene.here) is IncomingPhase.RUNNING
    scene.here.check_may_restore(9)  # no attempt under this epoch counts as failed


# ---- after a restart of the agent --------------------------------------------------------------


@pytest.mark.parametrize("helper", [False, True])
def test_a_granted_tree_that_cannot_be_let_go_by_the_next_agent_may_be_restored_again(
    scene: Scene, host: Host, monkeypatch: pytest.MonkeyPatch, helper: bool
) -> None:
    scene.with_devices(monkeypatch)
    if helper:
        scene.fails = "let_run_held"
    else:
        scene.devices = None
    scene.here._phase = IncomingPhase.GRANTED
    assert scene.here.resume_recovered() is False
    assert phase_of(scene.here) is IncomingPhase.FAILED
    assert scene.done[-1] == "unnoted"
    assert "drop" in scene.done
    scene.fails, scene.runs = "", False
    scene.with_devices(monkeypatch)
    host.restore(1)
    assert phase_of(scene.here) is IncomingPhase.RUNNING


def test_a_tree_without_a_grant_is_dropped_by_the_next_agent(scene: Scene) -> None:
    scene.here._phase = IncomingPhase.COMPLETE
    assert scene.here.resume_recovered() is False
    assert scene.done == ["drop"]
    assert phase_of(scene.here) is IncomingPhase.COMPLETE


# ---- its end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["RECEIVING", "COMPLETE", "FAILED"])
@pytest.mark.parametrize("fails", ["removed", "devices dropped"])
def test_a_removal_that_fails_is_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, phase: str, fails: str
) -> None:
    scene.with_devices(monkeypatch)
    if phase == "RECEIVING":
        scene.here.inbox.landed = None
    if phase == "FAILED":
        scene.here.fail(9, "CRIU broke off")
    assert phase_of(scene.here) is IncomingPhase[phase]
    (scene.here.images / NOTE).touch()
    scene.fails = fails
    with pytest.raises(StepFailed, match=f"{fails} failed"):
        scene.here.discard()
    assert phase_of(scene.here) is IncomingPhase.DISCARDED
    assert scene.here.images.exists() is (fails == "removed"), "the helper does not keep the image"
    scene.fails = ""
    scene.here.discard()
    assert scene.done[-1] == "devices dropped"
    assert not scene.here.images.exists()


def test_an_image_that_a_failed_attempt_has_used_up_is_not_tried_again(
    scene: Scene, host: Host
) -> None:
    """Only the source has the capsule then."""
    scene.fails = "prepare"
    scene.here.inbox.memory = SimpleNamespace(frees_after_copy=True, lost=0)
    with pytest.raises(StepFailed):
        host.restore()
    with pytest.raises(NotFound, match="was used up by an attempt that failed: restore: prepare"):
        scene.here.check_may_restore(10)


# ---- the table itself --------------------------------------------------------------------------


def test_no_phase_follows_another_that_the_table_does_not_name(scene: Scene) -> None:
    scene.here.inbox.landed = None
    for now, then in itertools.product(IncomingPhase, IncomingPhase):
        scene.here._phase = now
        if then is now or then in ALLOWED[now]:
            scene.here._enter(then)
        else:
            with pytest.raises(AssertionError, match="may not become"):
                scene.here._enter(then)


def test_nothing_runs_without_a_grant() -> None:
    before = {now for now, then in ALLOWED.items() if IncomingPhase.RUNNING in then}
    assert before == {IncomingPhase.GRANTED}
    before = {now for now, then in ALLOWED.items() if IncomingPhase.GRANTED in then}
    assert before == {IncomingPhase.RESTORING}
