# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's side of quiescing: hosts that answer as told, and what they are asked."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gates_scene import LIMITS, PAIR, WORLD, Host, a_job, member, two

from liveshift.errors import LiveshiftError, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config.timeouts import Timeouts
from liveshift.runtime.messages import Member, Message
from liveshift.runtime.migration.context import NoBoundary
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.moves.context import OrchestratorContext
from liveshift.runtime.quiesce import gates
from liveshift.runtime.quiesce.gates import Gates, communicator_text


def played(hosts: dict[str, Host], *, limits: Timeouts = LIMITS) -> tuple[Gates, Any]:
    """Closes the gates of the job; returns what came of it, an error included."""

    async def ask(host: str, message: Message, timeout: float) -> Message | None:
        assert timeout > 0
        await asyncio.sleep(0)
        return hosts[host](message)

    closed = Gates(ask)
    try:
        return closed, asyncio.run(closed.close(a_job(), limits, shared=False))
    except LiveshiftError as error:
        return closed, error


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "BACK_OFF_S", 0.0)


def test_all_ranks_are_told_the_highest_number_that_began_anywhere() -> None:
    hosts = two()
    _, boundary = played(hosts)
    assert boundary.numbers == {WORLD: 11, PAIR: 3}
    assert (
        boundary.text
        == "paused after collective 11 of gloo over ranks 0-1 (and 1 more communicator)"
    )
    assert not boundary.down
    for host in hosts.values():
        assert host.targets == {WORLD: 11, PAIR: 3}
        assert host.gate == "shut"
        (arm,) = host.said(messages.Arm)
        assert (arm.job, arm.hold, arm.limit) == ("gpt", 600, 120)


def test_a_communicator_of_one_rank_is_named_where_it_is_the_only_one_used() -> None:
    alone = PAIR + 1
    hosts = two()
    for host in hosts.values():
        host.begun = {}
    hosts["h0"].begun = {alone: 4}
    hosts["h0"].members.append(Member(alone, "gloo", "", 1, 0, 0, 3))
    _, boundary = played(hosts)
    assert boundary.text == "paused after collective 4 of gloo over rank 0"


def test_a_target_that_had_to_be_raised_is_raised_for_all() -> None:
    hosts = two()
    hosts["h1"].raises = [{PAIR: 5}]
    _, boundary = played(hosts)
    assert boundary.numbers == {WORLD: 11, PAIR: 5}
    assert hosts["h0"].targets[PAIR] == hosts["h1"].targets[PAIR] == 5


def test_one_that_was_about_to_go_further_is_let_through_after_all() -> None:
    hosts = two()
    hosts["h0"].not_still = [{WORLD: 12}]
    _, boundary = played(hosts)
    assert boundary.numbers[WORLD] == 12
    assert hosts["h1"].targets[WORLD] == 12
    assert [len(host.said(messages.Shut)) for host in hosts.values()] == [2, 2]


def test_what_can_never_be_a_boundary_is_not_tried_again() -> None:
    hosts = two()
    hosts["h1"].obstacles = ["rank 1: 4 operations on communicators nobody knows"]
    _, error = played(hosts)
    assert isinstance(error, NoBoundary)
    assert error.only_tcp
    assert "rank 1: 4 operations" in str(error)
    for host in hosts.values():
        assert len(host.said(messages.Arm)) == 1
        assert host.gate == "open"


def test_no_boundary_in_time_says_what_is_pending_and_the_gates_are_open() -> None:
    hosts = two()
    hosts["h1"].stuck = True
    _, error = played(hosts, limits=Timeouts(quiesce=0.05))
    assert isinstance(error, NoBoundary)
    assert "within 0.05 s: rank 1 owes gloo.barrier 7" in str(error)
    for host in hosts.values():
        assert len({arm.attempt for arm in host.said(messages.Arm)}) == gates.ATTEMPTS
        assert host.gate == "open"


def test_a_job_with_nccl_is_never_frozen_without_a_boundary() -> None:
    hosts = two("nccl")
    hosts["h1"].stuck = True
    _, error = played(hosts, limits=Timeouts(quiesce=0.05))
    assert isinstance(error, NoBoundary)
    assert not error.only_tcp


def test_a_job_whose_ranks_have_not_begun_stands_where_it_is() -> None:
    async def ask(_host: str, message: Message, _timeout: float) -> Message | None:
        return messages.Armed({}, [], 0, []) if isinstance(message, messages.Arm) else None

    boundary = asyncio.run(Gates(ask).close(a_job(), LIMITS, shared=False))
    assert boundary is gates.NOTHING_COUNTED


@pytest.mark.parametrize("at", [messages.Arm, messages.SetTargets, messages.Shut])
def test_a_host_that_falls_silent_leaves_no_gate_closed(at: type[Message]) -> None:
    hosts = two()
    answers = hosts["h1"].__call__

    def silent(ask: Message) -> Message | None:
        if isinstance(ask, at):
            raise Unreachable("h1 fell silent")
        return answers(ask)

    _, error = played({"h0": hosts["h0"], "h1": silent})  # type: ignore[dict-item]
    assert isinstance(error, Unreachable)
    assert hosts["h0"].gate == "open"
    assert hosts["h1"].gate == "open"


def test_communicators_are_torn_down_and_made_again_in_one_order() -> None:
    hosts = two("nccl")
    closed, boundary = played(hosts)
    assert boundary.down
    assert all(host.down for host in hosts.values())
    said = asyncio.run(closed.open(a_job(), LIMITS))
    assert said.startswith("2 communicators rebuilt in ")
    (first,), (second,) = (host.said(messages.Rebuild) for host in hosts.values())
    assert first.ids == second.ids == {WORLD: (1, b"w" * 128), PAIR: (2, b"p" * 128)}
    assert [host.gate for host in hosts.values()] == ["open", "open"]


def test_a_communicator_that_a_member_has_aborted_stays_down() -> None:
    """The others would wait for it, and the job with them."""
    hosts = two("nccl")
    closed, boundary = played(hosts)
    assert boundary.down
    hosts["h1"].aborted = True
    asyncio.run(closed.open(a_job(), LIMITS))
    (first,), (second,) = (host.said(messages.Rebuild) for host in hosts.values())
    assert first.ids == second.ids == {WORLD: (1, b"w" * 128)}
    assert [host.gate for host in hosts.values()] == ["open", "open"]


def test_numbers_of_attempts_do_not_come_again_when_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages keep those of an orchestrator that is gone."""
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    hosts = two()
    for _ in range(20):  # orchestrators
        played(hosts)
    numbers = [arm.attempt for arm in hosts["h0"].said(messages.Arm)]
    assert len(set(numbers)) == 20
    assert 0 < min(numbers) <= max(numbers) < 1 << 32, "as the page has it"


def test_a_second_move_of_the_job_joins_the_boundary() -> None:
    hosts = two()

    async def both() -> None:
        async def ask(host: str, message: Message, _timeout: float) -> Message | None:
            return hosts[host](message)

        closed = Gates(ask)
        first = await closed.close(a_job(), LIMITS, shared=False)
        assert await closed.close(a_job(), LIMITS, shared=True) is first
        await closed.open(a_job(), LIMITS)
        with pytest.raises(Refused, match="another move of gpt is under way"):
            await closed.close(a_job(), LIMITS, shared=True)
        assert await closed.close(a_job(), LIMITS, shared=False) is not first

    asyncio.run(both())
    assert [len(host.said(messages.Arm)) for host in hosts.values()] == [2, 2]


def test_a_second_move_of_a_job_that_is_frozen_in_place_does_not_look_for_a_boundary() -> None:
    hosts = two()
    hosts["h0"].obstacles = ["rank 0: communicators nobody knows"]

    async def both() -> None:
        async def ask(host: str, message: Message, _timeout: float) -> Message | None:
            return hosts[host](message)

        closed = Gates(ask)
        for shared in (False, True):
            with pytest.raises(NoBoundary) as caught:
                await closed.close(a_job(), LIMITS, shared=shared)
            assert caught.value.only_tcp

    asyncio.run(both())
    assert len(hosts["h0"].said(messages.Arm)) == 1


def test_a_host_that_did_not_hear_it_is_told_again_to_open() -> None:
    """Cut off for less than its own patience it would keep its gate closed, with signs of life."""
    hosts = two()

    async def play() -> None:
        deaf = 0

        async def ask(host: str, message: Message, _timeout: float) -> Message | None:
            nonlocal deaf
            if host == "h1" and isinstance(message, messages.OpenGate) and deaf < 3:
                deaf += 1
                raise Unreachable("h1 did not answer OpenGate")
            return hosts[host](message)

        closed = Gates(ask)
        quick = Timeouts(heartbeat=0.001)
        await closed.close(a_job(), quick, shared=False)
        assert await closed.open(a_job(), quick) == ""
        while hosts["h1"].gate != "open":
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(play(), 20))


def test_nobody_opens_what_another_attempt_has_closed() -> None:
    hosts = two()

    async def play() -> None:
        deaf = True

        async def ask(host: str, message: Message, _timeout: float) -> Message | None:
            if host == "h1" and isinstance(message, messages.OpenGate) and deaf:
                raise Unreachable("h1 did not answer OpenGate")
            return hosts[host](message)

        closed = Gates(ask)
        quick = Timeouts(heartbeat=0.001)
        await closed.close(a_job(), quick, shared=False)
        await closed.open(a_job(), quick)
        await closed.close(a_job(), quick, shared=False)
        deaf = False
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert hosts["h1"].gate == "shut"

    asyncio.run(asyncio.wait_for(play(), 20))


def test_what_was_taken_down_behind_a_cut_link_is_built_again() -> None:
    """Its TearDown came late, when the attempt had been given up."""
    hosts = two("nccl")

    async def play() -> None:
        cut = True

        async def ask(host: str, message: Message, _timeout: float) -> Message | None:
            if cut and host == "h1" and isinstance(message, messages.TearDown | messages.OpenGate):
                raise Unreachable("h1 fell silent")
            if cut and host == "h0" and isinstance(message, messages.TearDown):
                raise LiveshiftError("h0 can't")
            return hosts[host](message)

        closed = Gates(ask)
        quick = Timeouts(heartbeat=0.001)
        with pytest.raises(LiveshiftError):
            await closed.close(a_job(), quick, shared=False)
        hosts["h0"].down = hosts["h1"].down = True
        cut = False
        while any(host.gate != "open" for host in hosts.values()):
            await asyncio.sleep(0.001)
        assert not any(host.down for host in hosts.values())

    asyncio.run(asyncio.wait_for(play(), 20))


def test_what_stands_in_the_way_is_told_also_where_nothing_could_be_read() -> None:
    async def ask(_host: str, message: Message, _timeout: float) -> Message | None:
        if isinstance(message, messages.Arm):
            return messages.Armed({}, [], 0, ["process 3: page layout 1"])
        return messages.TornDown([], 0.0)

    with pytest.raises(NoBoundary, match="page layout 1"):
        asyncio.run(Gates(ask).close(a_job(), LIMITS, shared=False))


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_go_on_when_one_has_ended_are_let_go(fails: bool) -> None:
    opened: list[str] = []
    job = a_job()
    job.capsules["gpt/0"].code = 0

    class Opening:
        async def open(self, job: Job, _limits: Timeouts) -> str:
            opened.append(job.name)
            if fails:
                raise Unreachable("communicators are down")
            return "rebuilt"

        def forget(self, job: str) -> None:
            opened.append(f"forgot {job}")

    cluster = SimpleNamespace(timeouts=LIMITS)
    fleet = SimpleNamespace(cluster=cluster, moves_of=lambda _: [], is_up=None)
    records = SimpleNamespace(note=lambda *_: None, record=lambda *_: None)
    unused: Any = SimpleNamespace(request=None, publish=None, another_spare=None, predict=None)
    context = OrchestratorContext(
        cast(Any, fleet), unused, unused, unused, cast(Any, records), cast(Any, Opening())
    )
    said = asyncio.run(context.reopen(cast(Any, SimpleNamespace(job=job))))
    assert (said, opened) == (
        ("the job has ended", ["gpt", "forgot gpt"]) if fails else ("rebuilt", ["gpt"])
    )


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([member(1), member(0)], "gloo over ranks 0-1"),
        (
            [Member(5, "nccl", "tp", 3, r, w, 1) for r, w in enumerate((0, 2, 3))],
            "nccl tp over ranks 0,2-3",
        ),
        ([Member(5, "gloo", "", 1, 0, -1, 1)], "gloo over rank 0"),
    ],
)
def test_communicators_in_words(members: list[Member], words: str) -> None:
    assert communicator_text(members) == words
