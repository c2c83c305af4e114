# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the orchestrator and its hosts during a rewind. It keeps the order of what
happens, and checks at each order that the host may get it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.criu_glue.survey.found import Along, Survey
from liveshift.errors import NotFound, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.journal.snapshot_tables import RewindRow
from liveshift.runtime.messages import Message
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.model.ownership import may_pass
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.snapshot.rewind import Rewind

CLUSTER = config.parse(
    """
[cluster]
name = "rewind"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[timeouts]
heartbeat = 0.01
[hosts.h0]
address = "10.88.0.10"
[hosts.h1]
address = "10.88.0.11"
[hosts.h2]
address = "10.88.0.12"
[hosts.h3]
address = "10.88.0.13"
"""
).cluster

ALONG = Along("/tmp", 1, 0, 0, ("boot 8:1", "/var/lib/liveshift/capsules/gpt.0/tmp"))
SURVEY = Survey((1001, 1002), 300, 20, (), (), (), (), (), along=(ALONG,))
FACTS = messages.HostFacts("6.1", "x86_64", "cpu", [], "4.2.1", "0.1")
HOSTS = {"gpt/0": "h0", "gpt/1": "h2"}


class Died(BaseException):
    """The orchestrator dies here."""


class RewindScene:
    """A job of two: h1 is lost, gpt/1 goes to its holder h2, h3 is another spare. ``said``: what
    was done, in order. ``fails``: what the next orders of a kind, or of "kind host", meet."""

    cluster = CLUSTER

    def __init__(self) -> None:
        run = messages.RunJob("gpt", 2, ["torchrun", "train.py"], {}, "/", 0, [])
        capsules = {
            name: Capsule(name, n, host, 3, granted=False, started=True)
            for n, (name, host) in enumerate(HOSTS.items())
        }
        overlay = Overlay(1, "10.99.0.0/24")
        self.job = Job("gpt", overlay, run, 0, 0.0, capsules, "rewinding", None, 1)
        owners = {"gpt/0": ("h0", 1), "gpt/1": ("h1", 1)}
        holders = {name: ["h2"] for name in HOSTS}
        self.generation = Generation(17, "gpt", "step 9", 100.0, 0, owners, holders)
        new = {name: (host, 3) for name, host in HOSTS.items()}
        self.row = RewindRow(4, "gpt", 17, 1, new, ["h0", "h1"], "h1 is silent", 112.5, lost=["h1"])
        self.ran = True
        self.up = {"h0", "h2", "h3"}
        self.own_copies: set[str] = set()  # hosts that have kept a copy of their own capsule
        self.again = ""
        self.warnings: list[str] = []  # what a destination finds
        self.restoring = self.done = False
        self.ended: set[str] = set()
        self.said: list[str] = []
        self.notes: list[tuple[str, str]] = []
        self.fails: dict[str, list[Exception | None]] = {}
        self.ran_on: dict[str, list[str]] = {}  # by host: the capsules that it ends, and that run
        self.dies_at = -1  # the orchestrator dies before it does this
        self.asks: list[tuple[str, Any]] = []

    def rewind(self) -> Rewind:
        return Rewind(self, self.job, self.generation, self.row, ["h0", "h1"], 1.25)

    def _say(self, what: str) -> None:
        if len(self.said) == self.dies_at:
            self.dies_at = -1
            raise Died
        self.said.append(what)

    def _maybe_fail(self, *whats: str) -> None:
        for what in whats:
            if self.fails.get(what) and (error := self.fails[what].pop(0)) is not None:
                raise error

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        assert timeout > 0
        kind = type(message).__name__
        self._say(f"{kind} {host}")
        self.asks.append((host, message))
        if host not in self.up:
            raise Unreachable(f"{host} does not answer")
        if isinstance(message, messages.EndEarlier):
            self._maybe_fail(kind, f"{kind} {host}")
            assert message.book.rewinds == self.job.rewinds
            self.ended.add(host)
            return messages.EarlierEnded(self.ran_on.get(host, []))
        capsule = self._capsule(message)
        if not isinstance(message, messages.RestoreCapsule):
            self._maybe_fail(kind, f"{kind} {host}")
        if isinstance(message, messages.GetHeld):
            if host not in {"h2", *self.own_copies}:
                raise NotFound(f"{host} does not hold {message.image}")
            return messages.HeldFacts(SURVEY, FACTS, 1000)
        assert self.restoring, "nothing is restored before an earlier copy has ended"
        if isinstance(message, messages.Reserve):
            assert (host, message.epoch) == (capsule.host, capsule.epoch)
            assert not capsule.granted
            assert host in self.ended or host == "h3", "an earlier copy may be left there"
            return messages.Reserved([], f"tcp://{host}:7401", warnings=self.warnings)
        if isinstance(message, messages.ForwardHeld):
            assert (message.destination, message.endpoint[6:8]) == (capsule.host, capsule.host)
            return messages.Frozen(1000, [])
        assert isinstance(message, messages.RestoreCapsule)
        assert (host, message.epoch) == (capsule.host, capsule.epoch)
        self._maybe_fail(kind, f"{kind} {host}")
        capsule.granted = True  # its agent has claimed it
        self._maybe_fail("answer", f"answer {host}")
        return messages.Moved(1000, [])

    def _capsule(self, message: Any) -> Capsule:
        name = message.spec.name if isinstance(message, messages.Reserve) else message.capsule
        return self.job.capsules[name]

    def is_up(self, host: str) -> bool:
        return host in self.up

    def why_again(self, job: Job) -> str:
        return self.again

    def lacks(self, capsule: Capsule, why: str) -> None:
        self.again = why

    def before(self, job: Job) -> list[str]:
        return [] if self.restoring else self.row.before

    def may_have_run(self, row: RewindRow) -> bool:
        return self.ran

    def begin_restoring(self, row: RewindRow) -> None:
        self._say("begin restoring")
        self._maybe_fail("begin restoring")
        self.restoring = True

    def commit(self, capsule: Capsule, host: str, *, still: bool) -> None:
        if not may_pass(capsule.owner, still):
            raise Refused(f"{capsule.name} may run on {capsule.host}")
        self._maybe_fail("commit")
        capsule.host, capsule.epoch, capsule.granted = host, capsule.epoch + 1, False
        self._say(f"commit {capsule.name} {host} {capsule.epoch}")

    def another_host(self, capsule: Capsule, avoid: Collection[str]) -> str:
        if "h3" in avoid or "h3" not in self.up:
            raise Refused("no host has room")
        return "h3"

    async def publish(self, job: Job) -> None:
        self._say("publish")

    async def open_gates(self, job: Job) -> str:
        self._say("open gates")
        self._maybe_fail("open gates")
        assert all(capsule.granted for capsule in job.capsules.values())
        return ""

    def end_rewind(self, row: RewindRow) -> None:
        self._say("end")
        self._maybe_fail("end")
        self.job.state, self.done = "running", True

    def note(self, job: Job, kind: str, text: str) -> None:
        self.notes.append((kind, text))
