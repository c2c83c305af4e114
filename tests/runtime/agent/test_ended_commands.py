# SPDX-License-Identifier: Apache-2.0
"""What an agent does when a command has ended: its report, and the end of its network. Capsule and
orchestrator are stand-ins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from waits import until_async

from liveshift.errors import Unreachable
from liveshift.runtime import messages
from liveshift.runtime.agent import agent as module
from liveshift.runtime.agent.agent import Agent
from liveshift.runtime.agent.host.rank_deaths import RankEnd
from liveshift.runtime.daemon.tasks import Tasks
from liveshift.runtime.model.jobs import KILLED


class Ended:
    """An agent that reports the end of gpt/1, and the capsule. ``slow``: how often a peer has not
    read all yet. ``failure``: what the removal of the network raises. ``refused``: how many reports
    do not reach the orchestrator. ``ago``: how long ago the end is, by each report."""

    def __init__(
        self,
        *,
        slow: int = 0,
        failure: Exception | None = None,
        dead: bool = False,
        refused: int = 0,
    ) -> None:
        self.slow, self.failure, self.refused = slow, failure, refused
        self.ago: list[float] = []
        self.done: list[messages.Message | str] = []
        self.agent = agent = cast(Any, Agent.__new__(Agent))
        agent._request, agent._tasks = self.request, Tasks()
        timeouts = SimpleNamespace(suspicion=1.0, heartbeat=0.01)
        agent.cluster = SimpleNamespace(timeouts=timeouts)
        self.code: int | None = 7
        self.found_dead = dead
        self.spec, self.epoch = SimpleNamespace(name="gpt/1"), 3
        self.deaths = SimpleNamespace(first=None)
        agent.capsule_table, self.rebooted = self, dead

    async def blocking(self, name: str, work: Callable[[], bool | None]) -> bool | None:
        assert name == "gpt/1"
        return work()

    async def request(self, message: messages.Message, *_: object) -> None:
        assert isinstance(message, messages.CapsuleEnded)
        self.ago.append(message.ago_s)
        self.done.append(msgspec.structs.replace(message, ago_s=0.0))
        if len(self.ago) <= self.refused:
            raise Unreachable("the orchestrator is restarted")

    def exit_code(self) -> int | None:
        return None if self.found_dead else 7

    def delivers(self) -> bool:
        self.slow -= 1
        return self.slow >= 0

    def unplug(self) -> None:
        self.done.append("unplugged")
        if self.failure is not None:
            raise self.failure

    def report(self, *, done: int) -> list[messages.Message | str]:
        """What the agent does, once that are so many things."""

        async def play() -> None:
            await self.agent._report_ended(self)
            await until_async(lambda: len(self.done) == done)

        asyncio.run(play())
        return self.done


END = messages.CapsuleEnded("gpt/1", 3, 7, 0, 0)


def test_the_end_of_a_rank_is_told_even_if_its_network_cannot_be_removed() -> None:
    ended = Ended(failure=OSError(12, "Cannot allocate memory"))
    assert ended.report(done=2) == ["unplugged", END]


def test_a_peer_that_reads_slowly_gets_all_and_delays_no_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REPORTED_S", 0.01)
    assert Ended(slow=3).report(done=2) == [END, "unplugged"]


def test_a_peer_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELIVERY_S", 0.1)
    assert Ended(slow=10**9).report(done=2) == ["unplugged", END]


def test_a_capsule_that_died_with_its_host_is_told_as_such() -> None:
    told = Ended(dead=True).report(done=2)[1]
    assert told == messages.CapsuleEnded("gpt/1", 3, KILLED, found_dead=True, rebooted=True)


def test_it_is_told_how_long_ago_that_was_each_time() -> None:
    ended = Ended(refused=2)
    ended.report(done=4)
    one, two, three = ended.ago
    assert 0 < one < two - 0.009 < three - 0.018


def test_the_end_of_a_rank_counts_if_that_was_before() -> None:
    ended = Ended()
    ended.deaths.first = RankEnd(9, 41, time.clock_gettime(time.CLOCK_BOOTTIME) - 3.0)
    ended.report(done=2)
    assert 3.0 < ended.ago[0] < 13.0


def test_when_a_capsule_died_with_its_host_is_not_known() -> None:
    ended = Ended(dead=True)
    ended.report(done=2)
    assert ended.ago == [0.0]
