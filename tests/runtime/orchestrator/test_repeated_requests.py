# SPDX-License-Identifier: Apache-2.0
"""Who asks for repeated output gets it from the host that had the capsule before the rewind."""

from __future__ import annotations

import time
from typing import Any

import pytest
from api_scene import ALICE, BOB, Scene, people, scene

from liveshift.criu_glue.capsule.output import REWIND
from liveshift.errors import NotFound, NotPermitted, Unreachable
from liveshift.runtime.messages import Message, ReadRepeated, Repeated
from liveshift.runtime.model.snapshots import Generation

__all__ = ["people", "scene"]


class Hosts:
    """What hosts are asked for, and what they answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ReadRepeated]] = []
        self.answer: Repeated | Exception = Repeated(b"lines", 105)

    async def request(self, host: str, message: Message, timeout: float) -> Message:
        assert isinstance(message, ReadRepeated)
        self.asked.append((host, message))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def hosts(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts()
    monkeypatch.setattr(scene.stubs, "request", made.request)
    return made


def rewind(scene: Scene, **plan: str) -> None:
    """Take the job a back to a snapshot of now; its capsules run on these hosts then."""
    journal, job = scene.fleet.journal, scene.fleet.jobs["a"]
    tables = journal.snapshots
    owners = {n: (host, epoch) for n, _, _, host, epoch, _, _ in journal.capsules("a")}
    number = tables.begin_snapshot("a")
    newest = tables.newest("a")
    if newest is None:
        newest = Generation(number, "a", "", time.time(), job.rewinds, owners, {})
        tables.complete_snapshot(newest)
    row = tables.rewind("a", newest.number, {f"a/{n}": plan[f"h_{n}"] for n in range(2)}, "")
    job.enter(row.owners, row.rewinds, "rewinding")


def run(scene: Scene) -> None:
    """All its capsules are let run."""
    for name, _, _, host, epoch, _, _ in scene.fleet.journal.capsules("a"):
        scene.fleet.journal.grant(name, host, epoch)


def ask(scene: Scene, offset: int, until: int, who: int = ALICE) -> Any:
    return scene.here(who, ReadRepeated("a/0", offset, until))


def test_the_host_is_asked_that_had_the_capsule_before(scene: Scene, hosts: Hosts) -> None:
    rewind(scene, h_0="h1", h_1="h1")
    assert ask(scene, 100, REWIND) == Repeated(b"lines", 105, host="h0")
    assert hosts.asked == [("h0", ReadRepeated("a/0", 100, REWIND))]


def test_each_rewind_has_its_own_host(scene: Scene, hosts: Hosts) -> None:
    rewind(scene, h_0="h1", h_1="h1")
    run(scene)
    rewind(scene, h_0="h0", h_1="h1")
    ask(scene, 100, 2 * REWIND)
    ask(scene, REWIND, 2 * REWIND)
    assert hosts.asked == [
        ("h0", ReadRepeated("a/0", 100, REWIND)),
        ("h1", ReadRepeated("a/0", REWIND, 2 * REWIND)),
    ]


def test_a_copy_that_never_ran_has_printed_nothing(scene: Scene, hosts: Hosts) -> None:
    rewind(scene, h_0="h1", h_1="h1")
    rewind(scene, h_0="h0", h_1="h1")
    assert ask(scene, REWIND, 2 * REWIND) == Repeated(b"", 2 * REWIND)
    assert hosts.asked == []


def test_what_is_gone_is_said(scene: Scene, hosts: Hosts) -> None:
    rewind(scene, h_0="h1", h_1="h1")
    for error in (NotFound("h0 keeps nothing"), Unreachable("h0 stopped answering")):
        hosts.answer = error
        assert ask(scene, 100, REWIND) == Repeated(b"", REWIND, host="h0", gone=str(error))
    scene.fleet.hosts["h0"].heard = 0.0
    hosts.asked.clear()
    assert ask(scene, 100, REWIND) == Repeated(b"", REWIND, host="h0", gone="h0 is not up")
    assert hosts.asked == [], "nobody waits for it"


def test_of_a_job_from_elsewhere_the_journal_knows_nothing(scene: Scene, hosts: Hosts) -> None:
    told = ask(scene, 100, 3 * REWIND)
    assert told == Repeated(b"", 3 * REWIND, gone="the journal knows nothing of it")


def test_only_who_may_read_the_output_may_read_this(scene: Scene, hosts: Hosts) -> None:
    with pytest.raises(NotPermitted, match="read the output of a"):
        ask(scene, 0, REWIND, BOB)
    assert hosts.asked == []
