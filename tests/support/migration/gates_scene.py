# SPDX-License-Identifier: Apache-2.0
"""Hosts that answer about the gates of their ranks as a test says, and a job on them."""

from __future__ import annotations

from typing import Any

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.runtime import messages
from liveshift.runtime.config.timeouts import Timeouts
from liveshift.runtime.messages import Member, Message
from liveshift.runtime.model.jobs import Capsule, Job

WORLD, PAIR = 70, 71
LIMITS = Timeouts(quiesce=5.0)


def member(rank: int, library: str = "gloo", communicator: int = WORLD) -> Member:
    return Member(communicator, library, "", 2, rank, rank, 1 + communicator - WORLD)


class Host:
    """One host with one rank. It has ``begun`` operations of each clock; ``reaches`` lists, by
    version, the numbers beyond its targets that it then raises."""

    def __init__(self, rank: int, begun: dict[int, int], library: str = "gloo") -> None:
        self.begun = begun
        self.raises: list[dict[int, int]] = []
        self.not_still: list[dict[int, int]] = []
        self.obstacles: list[str] = []
        self.stuck = False
        self.members = [member(rank, library), member(rank, library, PAIR)]
        self.targets: dict[int, int] = {}
        self.version = 0
        self.gate = "open"
        self.down = False
        self.aborted = False  # its member of PAIR
        self.heard: list[Message] = []

    def __call__(self, ask: Message) -> Message | None:
        self.heard.append(ask)
        match ask:
            case messages.Arm():
                self.gate = "armed"
                return messages.Armed(self.begun, self.members, 1, self.obstacles)
            case messages.SetTargets():
                self.gate = "target"
                self.targets |= ask.targets
                self.version = ask.version
                raised = self.raises.pop(0) if self.raises else {}
                reached = not raised and not self.stuck
                return messages.TargetsSet(ask.version, reached, raised, [])
            case messages.Shut():
                self.gate = "shut"
                raised = self.not_still.pop(0) if self.not_still else {}
                return messages.TargetsSet(self.version, not raised, raised, [])
            case messages.TearDown():
                self.down = True
                return messages.TornDown([(WORLD, 1), (PAIR, 2)], 0.1)
            case messages.FreshIds():
                first = self.members[0].rank == 0
                ids = {WORLD: b"w" * 128, PAIR: b"p" * 128} if first else {}
                down = [(WORLD, 1), *([] if self.aborted else [(PAIR, 2)])]
                return messages.Fresh(ids, down, {WORLD: 2, PAIR: 2})
            case messages.Rebuild():
                self.down = False
                return messages.TornDown([], 0.1)
            case messages.OpenGate():
                if self.down:
                    return messages.TornDown([(WORLD, 1), (PAIR, 2)], 0.0)
                self.gate = "open"
                return messages.TornDown([], 0.0)
            case messages.ListBehind():
                return messages.Behind(["rank 1 owes gloo.barrier 7"] if self.stuck else [])
        raise AssertionError(f"nobody asks {ask}")

    def said(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


def two(library: str = "gloo") -> dict[str, Host]:
    return {
        "h0": Host(0, {WORLD: 10, PAIR: 3}, library),
        "h1": Host(1, {WORLD: 11, PAIR: 2}, library),
    }


def a_job(count: int = 2) -> Job:
    run = messages.RunJob("gpt", count, ["train"], {}, "/", 0, [])
    capsules = {f"gpt/{i}": Capsule(f"gpt/{i}", i, f"h{i}", 1) for i in range(count)}
    return Job("gpt", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)
