# SPDX-License-Identifier: Apache-2.0
"""Address books reach every host: at once, or with the hello that a host which missed one says."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from orchestrator_scene import FACTS, board, brain, says

from liveshift.errors import NotPermitted, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.fleet.status import status
from liveshift.runtime.messages import Books, CapsuleState, Heartbeat, Register
from liveshift.runtime.model.jobs import KILLED
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

__all__ = ["brain"]


LATE = 60.0


def other_files(brain: Orchestrator) -> list[str]:
    """The hosts of which `liveshift status` says that their file differs."""
    rows = status(brain.fleet, lambda job: True, sees_all=True).hosts
    return [row.name for row in rows if row.other_file]


def register(brain: Orchestrator, host: str, boot_id: str = "first") -> Books:
    said = says(brain, host, Register(host, FACTS, {}, brain.cluster.digest, boot_id))
    assert isinstance(said, Books)
    return said


def publish(brain: Orchestrator) -> list[str]:
    """Who has been told once everything that follows has been done."""

    async def all_of_it(work: Coroutine[Any, Any, None]) -> None:
        await work
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    board(brain).told.clear()
    asyncio.run(all_of_it(brain.address_book.publish(brain.fleet.jobs["a"])))
    return [host for host, _ in board(brain).told]


def move_to_h2(brain: Orchestrator) -> None:
    capsule = brain.fleet.jobs["a"].capsules["a/1"]
    capsule.host, capsule.epoch = "h2", capsule.epoch + 1


def test_the_book_changes_with_the_owners(brain: Orchestrator) -> None:
    job = brain.fleet.jobs["a"]
    first = job.book()
    assert first.where == {"10.99.0.1": ("h0", 1), "10.99.0.2": ("h1", 1)}
    assert job.book() is first
    job.rewinds = 1
    assert job.book() == msgspec.structs.replace(first, rewinds=1)
    job.rewinds = 0
    move_to_h2(brain)
    assert job.book().where == {"10.99.0.1": ("h0", 1), "10.99.0.2": ("h2", 2)}
    assert first.where["10.99.0.2"] == ("h1", 1), "what was said stays as it was"


def test_the_job_s_own_hosts_are_told_first(brain: Orchestrator) -> None:
    for host in brain.fleet.hosts:
        register(brain, host)
    move_to_h2(brain)
    assert sorted(publish(brain)[:2]) == ["h0", "h2"]
    assert board(brain).told[2][0] == "h1"
    assert all(book.where["10.99.0.2"] == ("h2", 2) for _, book in board(brain).told)


def test_an_agent_that_knows_another_orchestrator_is_to_say_hello(brain: Orchestrator) -> None:
    heartbeat = Heartbeat("h0", 7, [])
    with pytest.raises(Unreachable, match="h0 may have missed address books"):
        says(brain, "h0", heartbeat)
    assert brain.fleet.is_up("h0")
    assert brain.fleet.hosts["h0"].memory_free == 7, "its beat counts all the same"
    assert [book.job for book in register(brain, "h0").books] == ["a"]
    assert says(brain, "h0", heartbeat) is None


def test_a_host_that_was_away_for_a_moment_is_to_say_hello(brain: Orchestrator) -> None:
    for host in brain.fleet.hosts:
        register(brain, host)
    brain.fleet.hosts["h2"].heard -= LATE
    assert sorted(publish(brain)) == ["h0", "h1"]
    with pytest.raises(Unreachable):
        says(brain, "h2", Heartbeat("h2", 0, []))
    assert says(brain, "h1", Heartbeat("h1", 0, [])) is None
    register(brain, "h2")
    assert says(brain, "h2", Heartbeat("h2", 0, [])) is None


def test_a_host_that_did_not_take_a_book_is_to_say_hello(brain: Orchestrator) -> None:
    for host in brain.fleet.hosts:
        register(brain, host)
    board(brain).silent = {"h1", "h2"}
    assert publish(brain) == ["h0"]
    for host in ("h1", "h2"):
        with pytest.raises(Unreachable):
            says(brain, host, Heartbeat(host, 0, []))
    assert says(brain, "h0", Heartbeat("h0", 0, [])) is None


def test_only_a_new_agent_has_lost_what_it_does_not_name(brain: Orchestrator) -> None:
    capsule = brain.fleet.jobs["a"].capsules["a/0"]
    register(brain, "h0", "first")  # the capsule has not been started yet
    capsule.started = True
    register(brain, "h0", "first")  # said before it was told to start it, heard afterwards
    assert capsule.code is None
    register(brain, "h0", "second")
    assert capsule.code == KILLED


def test_a_hosts_key_in_an_operators_place_is_not_permitted(brain: Orchestrator) -> None:
    with pytest.raises(NotPermitted, match="the key of the host h1 is no operator's") as caught:
        says(brain, "h1", messages.GetStatus())
    assert "liveshift keys add-operator" in str(caught.value.hint)
    assert not brain.fleet.is_up("h1"), "no word of its agent"


def test_a_hello_with_another_digest_is_a_host_with_another_file(brain: Orchestrator) -> None:
    assert other_files(brain) == [], "none has said hello"
    register(brain, "h0")
    assert isinstance(says(brain, "h1", Register("h1", FACTS, {}, "another", "first")), Books)
    assert other_files(brain) == ["h1"]
    register(brain, "h1", "second")
    assert other_files(brain) == [], "its agent has taken up the orchestrator's"


def test_a_copy_of_before_a_rewind_is_ended_also_on_the_owner_s_host(
    brain: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[str, str, int]] = []
    monkeypatch.setattr(brain.endings, "end_stray", lambda *stray: ended.append(stray))
    register(brain, "h1")
    job, capsule = brain.fleet.jobs["a"], brain.fleet.jobs["a"].capsules["a/1"]

    def heartbeat(epoch: int, rewinds: int) -> None:
        state = CapsuleState("a/1", epoch, 3, 1, 1, 1.0, [0], "x", rewinds=rewinds)
        says(brain, "h1", Heartbeat("h1", 1, [state]))

    job.rewinds, capsule.epoch = 1, 3
    heartbeat(1, 0)
    assert (ended, capsule.seen) == ([("h1", "a/1", 1)], None)
    heartbeat(1, 1)
    heartbeat(3, 1)
    assert ended == [("h1", "a/1", 1)]
    assert capsule.seen is not None


def test_a_host_that_reports_without_an_image_has_lost_it(brain: Orchestrator) -> None:
    """It was switched off and is back, perhaps before anybody has missed it."""
    job, h2 = brain.fleet.jobs["a"], brain.fleet.hosts["h2"]
    owners = {f"a/{n}": (f"h{n}", 1) for n in range(2)}
    job.newest = Generation(7, "a", "step 9", 0.0, 0, owners, {"a/0": ["h1"], "a/1": ["h2"]})

    def reports(*held: str) -> frozenset[str]:
        says(brain, "h2", Register("h2", FACTS, {}, brain.cluster.digest, held=[*held]))
        return h2.lost

    assert reports("s7.1", "s3.0") == frozenset()
    assert reports("s7.0") == {"s7.1"}
    assert reports("s7.1") == frozenset()
    assert brain.fleet.hosts["h1"].lost == frozenset()
    job.state = "ended"
    assert reports() == frozenset()
