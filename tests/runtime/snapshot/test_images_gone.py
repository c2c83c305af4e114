# SPDX-License-Identifier: Apache-2.0
"""Whether all images of a snapshot are there: a job is given up only if no host can have one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
from rewind_scene import CLUSTER, RewindScene

from liveshift.errors import LiveshiftError, NotFound, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.model.rewind_places import Place
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.snapshot.images_gone import images_gone


class Hosts:
    """``has``: what a host answers for gpt/0 if it does not have it. Others have all."""

    cluster = CLUSTER

    def __init__(self, up: set[str], has: Mapping[str, LiveshiftError]) -> None:
        self.up, self.has = up, has
        self.asked: list[str] = []

    def is_up(self, host: str) -> bool:
        return host in self.up

    async def request(self, host: str, message: messages.GetHeld, timeout: float) -> None:
        if message.capsule == "gpt/0":
            self.asked.append(host)
            if host in self.has:
                raise self.has[host]


def look(hosts: Hosts, holders: list[str], own: list[str] | None = None) -> str:
    owners = {"gpt/0": ("h0", 1), "gpt/1": ("h1", 1)}
    held = {"gpt/0": holders, "gpt/1": holders[:1]}
    made = Generation(17, "gpt", "", 5.0, 0, owners, held, own_copies=own or [])
    plan = {"gpt/0": Place("h0", holders[0]), "gpt/1": Place("h1", holders[0])}
    context = cast(Any, hosts)
    return asyncio.run(images_gone(context, RewindScene().job, made, plan, trains=False))


GONE = NotFound("it is not here")


def test_one_holder_that_has_it_is_enough() -> None:
    hosts = Hosts({"h0", "h1"}, {"h0": GONE})
    assert look(hosts, ["h0", "h1"]) == ""
    assert hosts.asked == ["h0", "h1"], "the plan's holder first"


def test_it_is_gone_if_no_holder_has_it() -> None:
    hosts = Hosts({"h0", "h1"}, {"h0": GONE, "h1": NotFound("nor here")})
    assert look(hosts, ["h0", "h1"]) == "s17.0, the image of gpt/0, is gone: it is not here"


def test_a_holder_that_is_away_may_have_it_yet() -> None:
    hosts = Hosts({"h0"}, {"h0": GONE})
    with pytest.raises(Unreachable, match=r"h1, which may have s17\.0, .* is not up"):
        look(hosts, ["h0", "h1"])


def test_the_copy_at_home_does_for_a_holder_without_it() -> None:
    hosts = Hosts({"h0", "h2"}, {"h2": GONE})
    assert look(hosts, ["h2"], own=["gpt/0"]) == ""
    assert hosts.asked == ["h2", "h0"]
    assert look(Hosts({"h2"}, {"h2": GONE}), ["h2"], own=["gpt/0"]) != ""


def test_a_host_that_does_not_answer_says_nothing() -> None:
    hosts = Hosts({"h0", "h1"}, {"h0": Unreachable("h0 did not answer")})
    with pytest.raises(Unreachable):
        look(hosts, ["h0", "h1"])
