# SPDX-License-Identifier: Apache-2.0
"""Gates that open again: what is rebuilt, who is asked later, and what is forgotten with a job."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import pytest
from gates_scene import LIMITS, PAIR, WORLD, Host, a_job, two

from liveshift.errors import LiveshiftError, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config.timeouts import Timeouts
from liveshift.runtime.messages import Message
from liveshift.runtime.migration.context import NoBoundary
from liveshift.runtime.quiesce import gates
from liveshift.runtime.quiesce.gates import NOTHING_COUNTED, Gates

QUICK = Timeouts(heartbeat=0.001)


class Cluster:
    """Hosts of which one may be deaf to some messages for a while."""

    def __init__(self, hosts: dict[str, Host]) -> None:
        self.hosts = hosts
        self.gates = Gates(self._ask)
        self.deaf: dict[str, tuple[type[Message], ...]] = {}
        self.says: dict[type[Message], Message | None] = {}  # h1, instead of what is true

    async def _ask(self, host: str, message: Message, _timeout: float) -> Message | None:
        await asyncio.sleep(0)
        if isinstance(message, self.deaf.get(host, ())):
            raise Unreachable(f"{host} did not answer {type(message).__name__}")
        if host == "h1" and type(message) in self.says:
            self.hosts[host].heard.append(message)
            return self.says.pop(type(message))
        return self.hosts[host](message)

    async def close(self, shared: bool = False, limits: Timeouts = QUICK) -> gates.Boundary:
        return await self.gates.close(a_job(), limits, shared=shared)

    async def open(self) -> str:
        return await self.gates.open(a_job(), QUICK)


def played(scene: Cluster, play: Callable[[Cluster], Awaitable[None]]) -> Cluster:
    async def whole() -> None:
        await asyncio.wait_for(play(scene), 20)

    asyncio.run(whole())
    return scene


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "BACK_OFF_S", 0.0)


@pytest.mark.parametrize("who", ["h0 says so", "only h1 could"])
def test_what_is_down_waits_for_a_host_that_does_not_answer(who: str) -> None:
    """It would be waited for by all the others, in the middle of the rebuild."""
    scene = Cluster(two("nccl"))

    async def play(scene: Cluster) -> None:
        await scene.close()
        scene.deaf["h1"] = (messages.OpenGate,)
        if who == "only h1 could":
            scene.hosts["h0"].down = False
        with pytest.raises(Unreachable, match="communicators are down, and h1 does not answer"):
            await scene.open()

    played(scene, play)
    for host in scene.hosts.values():
        assert host.said(messages.FreshIds) == host.said(messages.Rebuild) == []
    assert scene.hosts["h1"].gate == "shut"


def test_a_rebuild_has_a_number_of_its_own() -> None:
    """Pages keep that of the attempt which tore down, as done."""
    scene = Cluster(two("nccl"))

    async def play(scene: Cluster) -> None:
        await scene.close()
        await scene.open()

    played(scene, play)
    (down,), (again,) = (scene.hosts["h0"].said(k) for k in (messages.TearDown, messages.Rebuild))
    (fresh,) = scene.hosts["h0"].said(messages.FreshIds)
    assert again.attempt == fresh.attempt == down.attempt + 1


def test_communicators_are_rebuilt_everywhere_in_the_order_in_which_they_were_made() -> None:
    """By the lowest ordinal that any member gives; in another order members wait for each other."""
    scene = Cluster(two("nccl"))
    sizes = {WORLD: 2, PAIR: 2}
    scene.says[messages.FreshIds] = messages.Fresh({}, [(WORLD, 9), (PAIR, 0)], sizes)

    async def play(scene: Cluster) -> None:
        await scene.close()
        await scene.open()

    played(scene, play)
    for host in scene.hosts.values():
        (rebuild,) = host.said(messages.Rebuild)
        assert rebuild.ids == {PAIR: (1, b"p" * 128), WORLD: (2, b"w" * 128)}


def test_when_a_rebuild_fails_all_of_it_is_taken_down_again() -> None:
    scene = Cluster(two("nccl"))

    async def play(scene: Cluster) -> None:
        await scene.close()
        scene.deaf["h1"] = (messages.Rebuild,)
        with pytest.raises(Unreachable, match="h1 did not answer Rebuild"):
            await scene.open()

    played(scene, play)
    for host in scene.hosts.values():
        assert len(host.said(messages.TearDown)) == 2
        assert host.down
        assert host.gate == "shut"


def test_a_host_that_rebuilt_and_did_not_hear_of_the_opening_is_told_again() -> None:
    scene = Cluster(two("nccl"))

    async def play(scene: Cluster) -> None:
        await scene.close()
        heard = scene.hosts["h1"].said
        opened = asyncio.create_task(scene.open())
        while not heard(messages.Rebuild):
            await asyncio.sleep(0)
        scene.deaf["h1"] = (messages.OpenGate,)
        assert "2 communicators rebuilt" in await opened
        assert scene.hosts["h1"].gate == "shut"
        scene.deaf.clear()
        while scene.hosts["h1"].gate != "open":
            await asyncio.sleep(0.001)

    played(scene, play)


@pytest.mark.parametrize("library", ["gloo", "nccl"])
def test_a_job_counts_as_opened_once_all_its_hosts_have_said_so(library: str) -> None:
    scene = Cluster(two(library))

    async def play(scene: Cluster) -> None:
        await scene.close()
        assert scene.gates.opened(a_job()) == 0.0
        scene.deaf["h1"] = (messages.OpenGate,)
        if library == "nccl":
            with pytest.raises(LiveshiftError):
                await scene.open()
        else:
            await scene.open()
        assert scene.gates.opened(a_job()) == 0.0, "h1 has not answered"
        scene.deaf.clear()
        before = time.monotonic()
        await scene.open()
        assert before <= scene.gates.opened(a_job()) <= time.monotonic()
        scene.gates.forget("gpt")
        assert scene.gates.opened(a_job()) == 0.0

    played(scene, play)


def test_nothing_is_opened_later_for_a_job_that_has_ended() -> None:
    scene = Cluster(two())

    async def play(scene: Cluster) -> None:
        await scene.close()
        scene.deaf["h1"] = (messages.OpenGate,)
        await scene.open()
        scene.gates.forget("gpt")
        scene.deaf.clear()
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert scene.hosts["h1"].gate == "shut"

    played(scene, play)


def test_a_later_job_of_the_name_has_no_boundary_to_share() -> None:
    async def play(scene: Cluster) -> None:
        await scene.close()
        scene.gates.forget("gpt")
        with pytest.raises(Refused, match="has no boundary to share"):
            await scene.close(shared=True)

    played(Cluster(two()), play)


@pytest.mark.parametrize("how", ["opened", "forgotten"])
def test_a_job_is_frozen_in_place_until_it_goes_on(how: str) -> None:
    scene = Cluster(two())
    scene.hosts["h0"].obstacles = ["rank 0: communicators nobody knows"]

    async def play(scene: Cluster) -> None:
        with pytest.raises(NoBoundary):
            await scene.close()
        with pytest.raises(NoBoundary, match="another rank of the job is frozen in place"):
            await scene.close(shared=True)
        if how == "opened":
            await scene.open()
        else:
            scene.gates.forget("gpt")
        with pytest.raises(Refused, match="has no boundary to share"):
            await scene.close(shared=True)

    played(scene, play)


def test_what_stands_in_the_way_when_gates_shut_ends_the_attempt() -> None:
    scene = Cluster(two())
    scene.says[messages.Shut] = messages.TargetsSet(
        1, True, {}, ["rank 1: its gate opened by itself"]
    )

    async def play(scene: Cluster) -> None:
        with pytest.raises(NoBoundary, match="its gate opened by itself"):
            await scene.close()

    played(scene, play)
    assert [host.gate for host in scene.hosts.values()] == ["open", "open"]


def test_what_stands_in_the_way_before_they_shut_ends_it_as_well() -> None:
    scene = Cluster(two())
    scene.says[messages.SetTargets] = messages.TargetsSet(
        1, False, {}, ["rank 1: a group without end"]
    )

    async def play(scene: Cluster) -> None:
        with pytest.raises(NoBoundary, match="a group without end"):
            await scene.close()

    played(scene, play)
    assert scene.hosts["h0"].said(messages.Shut) == []


def test_a_host_that_says_it_is_there_and_is_beyond_is_no_boundary() -> None:
    scene = Cluster(two())
    scene.says[messages.Shut] = messages.TargetsSet(1, True, {WORLD: 12}, [])
    boundaries = []

    async def play(scene: Cluster) -> None:
        boundaries.append(await scene.close())

    played(scene, play)
    assert boundaries[0].numbers == {WORLD: 12, PAIR: 3}
    assert len(scene.hosts["h0"].said(messages.Shut)) == 2


def test_an_answer_to_another_question_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "ATTEMPTS", 1)
    scene = Cluster(two())
    scene.says[messages.Shut] = messages.TornDown([], 0.0)

    async def play(scene: Cluster) -> None:
        with pytest.raises(
            LiveshiftError,
            match=r"h1 answered the request to .* with TornDown",
        ):
            await scene.close()

    played(scene, play)


def test_a_boundary_is_looked_for_twice() -> None:
    scene = Cluster(two())
    scene.hosts["h1"].stuck = True

    async def play(scene: Cluster) -> None:
        with pytest.raises(NoBoundary, match="no collective boundary within"):
            await scene.close(limits=Timeouts(quiesce=0.05))

    played(scene, play)
    assert len(scene.hosts["h0"].said(messages.Arm)) == 2


def test_a_job_without_ranks_or_collectives_says_so() -> None:
    scene = Cluster({name: Host(rank, {}) for rank, name in enumerate(("h0", "h1"))})
    assert not NOTHING_COUNTED.down
    boundaries = []

    async def play(scene: Cluster) -> None:
        boundaries.append(await scene.close(limits=LIMITS))

    played(scene, play)
    assert "2 communicators" in boundaries[0].text


def test_numbers_of_attempts_fit_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: (1 << bits) - 1)
    scene = Cluster(two())

    async def play(scene: Cluster) -> None:
        await scene.close()

    played(scene, play)
    (arm,) = scene.hosts["h0"].said(messages.Arm)
    assert 0 < arm.attempt < 1 << 32
