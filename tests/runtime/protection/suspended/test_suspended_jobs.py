# SPDX-License-Identifier: Apache-2.0
"""What people and hosts hear of a job that is suspended, and what is refused meanwhile."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from api_scene import ALICE, BOB, OTTO, Scene, people, scene
from orchestrator_parts import Parts, parts
from orchestrator_scene import FACTS, brain, says

from liveshift.errors import LiveshiftError, NotPermitted, Refused
from liveshift.runtime import messages
from liveshift.runtime.config.access import Role
from liveshift.runtime.messages import CapsuleState, Heartbeat, Message
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.moves.evacuation import Evacuation
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

__all__ = ["brain", "parts", "people", "scene"]

EARLIER = CapsuleState("a/0", 1, 2, 0, 40, 1.0, [0], "true", rewinds=0)


def suspended(brain: Orchestrator) -> None:
    """As the write leaves the job a: no capsule is granted, and each has a later epoch."""
    owners = {f"a/{n}": (f"h{n}", 3) for n in range(2)}
    brain.fleet.jobs["a"].enter(owners, 1, "suspended")


# ---- hosts -----------------------------------------------------------------------------------


def test_a_heartbeat_of_an_earlier_copy_is_not_taken_for_the_job(
    brain: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suspension ends it behind a locked network; a kill would close its connections."""
    strays: list[str] = []
    monkeypatch.setattr(brain.endings, "end_stray", lambda *what: strays.append(str(what)))
    suspended(brain)
    brain.fleet.hosts["h0"].books_current = True
    says(brain, "h0", Heartbeat("h0", 1 << 30, [EARLIER]))
    assert brain.fleet.jobs["a"].capsules["a/0"].seen is None
    assert strays == []
    assert brain.fleet.unknown["h0"] == []


def test_a_host_that_comes_back_without_a_suspended_capsule_ends_nothing(
    brain: Orchestrator,
) -> None:
    suspended(brain)
    register = messages.Register("h0", FACTS, {}, brain.cluster.digest, "another boot")
    books = says(brain, "h0", register)
    assert isinstance(books, messages.Books)
    (book,) = books.books
    assert (book.job, book.rewinds) == ("a", 1), "so it ends what it has of it"
    assert [c.code for c in brain.fleet.jobs["a"].capsules.values()] == [None, None]
    assert brain.fleet.jobs["a"].state == "suspended"


def test_the_end_of_an_earlier_copy_is_not_the_end_of_the_job(brain: Orchestrator) -> None:
    suspended(brain)
    says(brain, "h0", messages.CapsuleEnded("a/0", 1, 137))
    assert brain.fleet.jobs["a"].capsules["a/0"].code is None


def test_a_changed_cluster_file_interrupts_no_work_on_images_in_a_directory(
    brain: Orchestrator,
) -> None:
    assert brain.idle()
    brain.images.busy["a"] = "its images are being saved"
    assert not brain.idle()


@pytest.mark.parametrize("directory", ["", "/kept"])
def test_the_only_holder_of_a_suspended_job_stays_in_the_cluster_file(
    brain: Orchestrator, directory: str
) -> None:
    fleet = brain.fleet
    suspended(brain)
    holders = {} if directory else {"a/0": ["h2"], "a/1": ["h2"]}
    owners = {f"a/{n}": (f"h{n}", 1) for n in range(2)}
    fleet.jobs["a"].newest = Generation(1, "a", "step 9", 0.0, 0, owners, holders, 9, directory)
    assert fleet.missing(fleet.hosts) == ""
    left = [host for host in fleet.hosts if host != "h2"]
    why = fleet.missing(left)
    assert (not why) if directory else "`liveshift resume a` before you remove h2" in why


# ---- moves and evacuations -------------------------------------------------------------------


def test_a_suspended_job_is_not_moved(parts: Parts) -> None:
    job = parts.fleet.jobs["gpt"]
    job.state = "suspended"
    with pytest.raises(Refused, match="gpt is suspended, and is on no host") as refused:
        parts.migrations.start(Order(job, job.capsules["gpt/1"], "h2", "a test", "root"))
    assert refused.value.hint == "`liveshift resume gpt` lets it go on"


def test_a_suspended_job_is_not_evacuated_from_its_former_host(parts: Parts) -> None:
    fleet = parts.fleet
    fleet.jobs["gpt"].state = "suspended"
    fleet.taints["h1"] = ("hot", "root")

    async def evacuate() -> messages.Evacuating:
        evacuation = Evacuation(fleet, parts.planner, parts.migrations)
        plan = await evacuation.plan("h1", 30.0)
        work = asyncio.ensure_future(evacuation.run())
        await asyncio.sleep(0.2)
        assert not work.done()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return plan

    plan = asyncio.run(evacuate())
    assert plan.capsules == []
    assert fleet.migrations == {}
    assert not [e for e in fleet.journal.events("", 0) if e.kind == "not moved"]


# ---- people ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [messages.SuspendJob("a"), messages.ResumeJob("a")])
def test_who_wants_a_job_suspended_or_resumed_is_passed_on(scene: Scene, ask: Message) -> None:
    what = "suspend" if isinstance(ask, messages.SuspendJob) else "resume"
    scene.here(ALICE, ask)
    scene.here(OTTO, ask)
    scene.key(Role.OPERATE, ask)
    told = [f"{what} a for {who}" for who in ("alice", "otto", "ops (key)")]
    assert scene.stubs.told == told
    with pytest.raises(NotPermitted, match=f"bob may not {what} a: "):
        scene.here(BOB, ask)
    assert scene.stubs.told == told


@pytest.mark.parametrize("kind", [messages.SuspendJob, messages.ResumeJob])
def test_a_job_that_does_not_exist_is_neither_suspended_nor_resumed(
    scene: Scene, kind: type[messages.SuspendJob | messages.ResumeJob]
) -> None:
    with pytest.raises(LiveshiftError, match='no job "nix"'):
        scene.here(ALICE, kind("nix"))
    assert scene.stubs.told == []


@pytest.mark.parametrize("ask", [messages.SuspendJob("a"), messages.ResumeJob("a")])
def test_nothing_is_suspended_or_resumed_before_a_restored_journal_has_caught_up(
    scene: Scene, ask: Message
) -> None:
    scene.fleet.journal.file.restored = True
    with pytest.raises(Refused, match="before h0, h1 reported what is there"):
        scene.here(ALICE, ask)
    assert scene.stubs.told == []


@pytest.mark.parametrize("wait", [0.0, 10.0])
def test_the_output_of_a_suspended_job_is_in_its_image(scene: Scene, wait: float) -> None:
    scene.fleet.jobs["a"].state = "suspended"
    began = time.monotonic()
    with pytest.raises(Refused, match="a is suspended: its output is part of its") as refused:
        scene.here(ALICE, messages.ReadOutput("a/0", 0, wait))
    assert refused.value.hint == "`liveshift resume a` lets it go on"
    assert time.monotonic() - began < 5, "it is not waited for"
    assert scene.stubs.told == []


def test_a_reader_that_waits_while_the_job_is_suspended_is_told_so(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(host: str, message: Message, timeout: float) -> Message:
        scene.fleet.jobs["a"].state = "suspended"
        raise LiveshiftError("h0 does not answer")

    monkeypatch.setattr(scene.stubs, "request", silent)
    with pytest.raises(Refused, match="a is suspended"):
        scene.here(ALICE, messages.ReadOutput("a/0", 0, 20.0))


def test_a_suspended_job_has_no_processes_to_inspect(scene: Scene) -> None:
    scene.fleet.jobs["a"].state = "suspended"
    with pytest.raises(Refused, match="a is suspended: no host runs it"):
        scene.here(ALICE, messages.GetInspection("a/0"))
    assert scene.stubs.told == []


@pytest.mark.parametrize("sent", [signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGSTOP])
def test_a_signal_reaches_nothing_of_a_suspended_job(scene: Scene, sent: signal.Signals) -> None:
    scene.fleet.jobs["a"].state = "suspended"
    with pytest.raises(Refused, match=f"a is suspended: {sent.name} reaches nothing") as refused:
        scene.here(ALICE, messages.SignalJob("a", sent))
    assert refused.value.hint == "`liveshift resume a` lets it go on"
    assert scene.stubs.told == []


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_suspended_job_may_be_stopped(scene: Scene, sent: signal.Signals) -> None:
    scene.fleet.jobs["a"].state = "suspended"
    scene.here(ALICE, messages.SignalJob("a", sent))
    assert scene.stubs.told == [f"signal a {sent}"]
