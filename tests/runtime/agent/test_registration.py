# SPDX-License-Identifier: Apache-2.0
"""What an agent does with the address books that answer its registration, in which order.

Orchestrator, capsules and network are stand-ins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.errors import Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.agent.agent import Agent
from liveshift.runtime.messages import Book, Locate


class Scene:
    """h0, which gets the books of some jobs; the earlier copies of some cannot be ended."""

    def __init__(self, ends: Mapping[str, Exception | None]) -> None:
        self.done: list[str] = []
        self.ends = ends
        self.capsules: dict[str, object] = {}
        agent: Any = Agent.__new__(Agent)
        agent.host, agent._boot_id, agent._request = "h0", "boot", self.answer
        agent.registry = SimpleNamespace(incoming={}, facts=None)
        agent.cluster = SimpleNamespace(digest="", timeouts=SimpleNamespace(suspicion=1.0))
        agent.capsule_table = self
        agent.holding = SimpleNamespace(held=lambda: ["s7.1"])
        self.agent = agent

    async def answer(self, register: messages.Register, *_: object) -> messages.Books:
        assert register.rewinds == {"a": 1}, "it says which rewinds it has heard of"
        assert register.held == ["s7.1"], "and which images it holds"
        self.done.append("registered")
        return messages.Books([Book(job, 7, "10.99.7.0/24", {}, 2) for job in self.ends])

    def rewinds(self) -> dict[str, int]:
        return {"a": 1}

    async def end_earlier(self, book: Book) -> None:
        self.done.append(f"end {book.job}")
        if (error := self.ends[book.job]) is not None:
            raise error

    async def locate(self, request: Locate) -> None:
        self.done.append(f"locate {request.book.job}")

    async def forget_unknown(self, jobs: set[str]) -> None:
        self.done.append(f"forget all but {sorted(jobs)}")


def registering(ends: Mapping[str, Exception | None]) -> list[str]:
    scene = Scene(ends)
    asyncio.run(scene.agent._register())
    return scene.done


def test_all_earlier_copies_end_before_any_address_is_entered() -> None:
    assert registering({"a": None, "b": None}) == [
        "registered",
        "end a",
        "end b",
        "locate a",
        "locate b",
        "forget all but ['a', 'b']",
    ]


@pytest.mark.parametrize("error", [Refused("it does not end"), OSError(5, "Input/output error")])
def test_a_copy_that_does_not_end_keeps_no_other_job_from_its_book(error: Exception) -> None:
    assert registering({"a": error, "b": None}) == [
        "registered",
        "end a",
        "end b",
        "locate b",
        "forget all but ['a', 'b']",
    ]


@pytest.mark.parametrize("silent", [False, True])
def test_what_an_earlier_agent_was_freezing_goes_on_after_the_answer_or_without_one(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """A copy from before a rewind has been ended by then."""
    scene = Scene({"a": None})
    agent: Any = scene.agent

    async def let_go_on() -> None:
        scene.done.append("let go on")
        raise asyncio.CancelledError  # what follows is not looked at

    async def no_answer(*_: object) -> None:
        raise Unreachable("the orchestrator is silent")

    agent.registry.let_go_on = let_go_on
    agent.uplink = SimpleNamespace(connection=SimpleNamespace(peer_boot_id=1))
    if silent:
        monkeypatch.setattr(agent, "_request", no_answer)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(agent._report())
    answered = ["registered", "end a", "locate a", "forget all but ['a']"]
    assert scene.done == [*([] if silent else answered), "let go on"]
