# SPDX-License-Identifier: Apache-2.0
"""What other hosts of a job say of one that is not heard."""

from __future__ import annotations

import asyncio

import pytest
from rewind_scene import CLUSTER, RewindScene

from liveshift.errors import Unreachable
from liveshift.runtime.losses.link_votes import MOST_VOTERS
from liveshift.runtime.losses.peer_votes import PeerVotes
from liveshift.runtime.losses.watch import HostContact
from liveshift.runtime.messages import HostsReached, Message, TryHosts

SEEN = {f"h{n}": HostContact(100.0) for n in range(6)}


class Scene:
    """The job gpt on h0 to h5. ``say``: by host, whether it reaches another. Others say nothing."""

    def __init__(self, **say: bool) -> None:
        self.say = say
        self.asked: list[str] = []
        self.woken = 0
        self.job = RewindScene().job
        first = self.job.capsules["gpt/0"]
        self.job.capsules |= {
            f"gpt/{n}": type(first)(f"gpt/{n}", n, f"h{n}", 3, started=True) for n in range(6)
        }
        self.votes = PeerVotes(CLUSTER.timeouts, self.request, self.wake)

    def wake(self) -> None:
        self.woken += 1

    async def request(self, host: str, message: Message, _limit: float) -> Message | None:
        assert isinstance(message, TryHosts)
        (asked,) = message.hosts
        self.asked.append(host)
        if host not in self.say:
            raise Unreachable(f"{host} does not answer")
        return HostsReached([asked] if self.say[host] else [])

    def unreached(self, *late: str) -> set[str]:
        """What the peers have said once they were asked about these hosts."""

        async def ask() -> None:
            self.votes.ask_about(self.job, late, SEEN)
            self.votes.ask_about(self.job, late, SEEN)  # the first question is not answered yet
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)

        asyncio.run(ask())
        return self.votes.unreached(self.job, SEEN)


@pytest.mark.parametrize(
    ("say", "unreached"),
    [
        ({"h0": False, "h1": False, "h2": False}, {"h5"}),
        ({"h0": False, "h1": False, "h2": True}, set()),
        ({"h0": False}, {"h5"}),  # those that do not answer say nothing
        ({}, set()),
    ],
)
def test_a_host_is_unreached_if_no_peer_that_answers_reaches_it(
    say: dict[str, bool], unreached: set[str]
) -> None:
    scene = Scene(**say)
    assert scene.unreached("h5") == unreached
    assert scene.asked == ["h0", "h1", "h2"][:MOST_VOTERS], "some of them, and each once"
    assert scene.woken == bool(say)


def test_hosts_that_are_late_themselves_are_not_asked() -> None:
    scene = Scene(h0=True, h1=False)
    assert scene.unreached("h0", "h5") == {"h0", "h5"}
    assert set(scene.asked) == {"h1", "h2", "h3"}


def test_what_was_said_counts_until_the_host_is_heard_and_for_that_job_only() -> None:
    scene = Scene(h0=False)
    assert scene.unreached("h5") == {"h5"}
    later = SEEN | {"h5": HostContact(101.0)}
    assert scene.votes.unreached(scene.job, later) == set()
    scene.votes.forget_all_but(["gpt"])
    assert scene.votes.unreached(scene.job, SEEN) == {"h5"}
    scene.votes.forget_all_but(["another"])
    assert scene.votes.unreached(scene.job, SEEN) == set()
