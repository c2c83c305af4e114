# SPDX-License-Identifier: Apache-2.0
"""Signals to jobs and the end of jobs that nobody wants any more, with a real journal and agents
that are a stand-in: they refuse signals to what is frozen, as the real ones do."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from fleet_scene import a_fleet
from full_journal import empty, fill

from liveshift.errors import LiveshiftError, NotFound, Refused
from liveshift.runtime import messages
from liveshift.runtime.fleet.endings import Endings
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.fleet.stopping import Stopping
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Capsule
from liveshift.runtime.model.steps import MigrationStep

GRACE = "[timeouts]\ngrace = 0.3\nheartbeat = 0.05\nsuspicion = 5\n"
TERM, KILL, INT, USR1 = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGUSR1


class Scene:
    """The job a, its capsule 0 on h0 and its capsule 1 on h1; h2 is free."""

    def __init__(self, state: Path, fleet: Fleet | None = None) -> None:
        self.fleet = fleet or a_fleet(state, GRACE)
        self.job = self.fleet.jobs["a"]
        for host in self.fleet.hosts.values():
            host.heard = time.monotonic()
        self.got: list[tuple[str, str, int, float]] = []  # capsule, host, signal, when
        self.frozen: set[str] = set()
        self.deaf = False  # SIGTERM does nothing
        self.stopping = Stopping(self.fleet, cast(Any, self))
        self.endings = Endings(self.fleet, cast(Any, self), self.stopping)

    def capsule(self, index: int) -> Capsule:
        return self.job.capsules[f"a/{index}"]

    async def request(self, host: str, word: Any, _limit: float) -> None:
        """As the agents do."""
        capsule = self.job.capsules[word.capsule]
        signum = KILL if isinstance(word, messages.End) else word.signum
        if host != capsule.host:
            raise NotFound(f"{word.capsule} is not on {host}")
        if word.capsule in self.frozen and signum != KILL:
            raise Refused(f"{word.capsule} is frozen")
        self.got.append((word.capsule, host, signum, time.monotonic()))
        if signum == KILL or (signum == TERM and not self.deaf):
            self.endings.capsule_ended(self.job, capsule, 128 + signum)

    def seen(self) -> list[tuple[str, str, int]]:
        return [entry[:3] for entry in self.got]

    def told(self, capsule: str) -> list[str]:
        return [event.text for event in self.fleet.journal.events(capsule, 0)]

    def lose(self, host: str) -> None:
        self.fleet.hosts[host].heard = 0.0

    def comes_back(self, host: str) -> None:
        self.fleet.hosts[host].heard = time.monotonic()

    def move(self, index: int, step: MigrationStep) -> HostMigration:
        """A move of a capsule to h2 that stands at a step until a test changes that."""
        made = HostMigration(cast(Any, self), 7, Order(self.job, self.capsule(index), "h2"))
        made.step = step
        made.capsule.migration = made.name
        self.fleet.migrations[made.name] = made
        return made

    @property
    def cluster(self) -> Any:
        return self.fleet.cluster

    def grace_is_far(self) -> None:
        """What happens within the patience of until() has then not waited for the grace time."""
        object.__setattr__(self.cluster.timeouts, "grace", 60.0)

    async def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not true():
            assert time.monotonic() < deadline, f"it did not happen; sent: {self.got}"
            await asyncio.sleep(0.005)

    async def over(self) -> None:
        await self.until(lambda: self.job.state == "ended")


Act = Callable[[Scene], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Act], Scene]:
    def run(act: Act) -> Scene:
        async def scene() -> Scene:
            made = Scene(tmp_path)
            await act(made)
            return made

        return asyncio.run(scene())

    return run


Play = Callable[[Act], Scene]


@pytest.mark.parametrize(
    "step", [MigrationStep.PREPARING, MigrationStep.PRECOPYING, MigrationStep.QUIESCING]
)
def test_a_signal_reaches_at_once_what_trains_while_it_moves(
    play: Play, step: MigrationStep
) -> None:
    async def act(scene: Scene) -> None:
        scene.grace_is_far()
        scene.move(1, step)
        await scene.stopping.signal(scene.job, USR1, "root")
        await scene.until(lambda: len(scene.got) == 2)
        assert sorted(scene.seen()) == [("a/0", "h0", USR1), ("a/1", "h1", USR1)]

    play(act)


def test_ranks_get_a_signal_together_once_the_frozen_one_runs_at_its_destination(
    play: Play,
) -> None:
    async def act(scene: Scene) -> None:
        scene.grace_is_far()
        move = scene.move(1, MigrationStep.RESTORING)
        scene.capsule(1).host = "h2"
        scene.frozen = {"a/1"}
        sending = asyncio.create_task(scene.stopping.signal(scene.job, INT, "root"))
        await asyncio.sleep(0.3)
        assert scene.got == [], "one of them cannot take it yet"
        scene.frozen, move.step = set(), MigrationStep.RESUMING
        await scene.until(lambda: len(scene.got) == 2)
        assert sorted(scene.seen()) == [("a/0", "h0", INT), ("a/1", "h2", INT)]
        await sending

    play(act)


def test_what_is_frozen_just_then_gets_it_later_and_nobody_gets_it_twice(play: Play) -> None:
    """The freeze began while the signal was on its way; then the capsule came to be elsewhere."""

    async def act(scene: Scene) -> None:
        scene.move(1, MigrationStep.QUIESCING)
        scene.frozen = {"a/1"}
        sending = asyncio.create_task(scene.stopping.signal(scene.job, USR1, "root"))
        await scene.until(lambda: scene.got)
        await asyncio.sleep(0.2)
        assert scene.seen() == [("a/0", "h0", USR1)]
        scene.capsule(1).migration, scene.capsule(1).host, scene.frozen = None, "h2", set()
        await scene.until(lambda: len(scene.got) > 1)
        await sending
        assert scene.seen() == [("a/0", "h0", USR1), ("a/1", "h2", USR1)]

    play(act)


def test_ranks_do_not_wait_for_one_that_stays_frozen_for_longer_than_the_grace_time(
    play: Play,
) -> None:
    """That one gets it as soon as it runs. Another signal waits until then."""

    async def act(scene: Scene) -> None:
        move = scene.move(1, MigrationStep.RESTORING)
        scene.frozen = {"a/1"}
        began = time.monotonic()
        sending = asyncio.create_task(scene.stopping.signal(scene.job, USR1, "root"))
        await scene.until(lambda: scene.got)
        assert time.monotonic() - began >= 0.3, "it is not sent to one alone before"
        await asyncio.sleep(0.2)
        assert scene.seen() == [("a/0", "h0", USR1)]
        scene.frozen, move.step = set(), MigrationStep.RESUMING
        await scene.until(lambda: len(scene.got) > 1)
        await sending
        assert scene.seen() == [("a/0", "h0", USR1), ("a/1", "h1", USR1)]

    play(act)


def test_a_signal_to_one_that_stays_frozen_for_ever_is_given_up_and_told(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.move(1, MigrationStep.RESTORING)
        scene.frozen = {"a/1"}
        object.__setattr__(scene.cluster.timeouts, "standstill", 0.6)
        for signum in (USR1, INT):
            await scene.stopping.signal(scene.job, signum, "root")
        await scene.until(lambda: len(scene.told("a/1")) == 2)
        assert scene.seen() == [("a/0", "h0", USR1), ("a/0", "h0", INT)]
        assert scene.told("a/1") == [
            f"{name} may not have reached it on h1: a/1 is frozen" for name in ("SIGUSR1", "SIGINT")
        ]

    play(act)


def test_a_signal_to_a_host_that_is_away_is_told_and_not_kept(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.lose("h1")
        await scene.stopping.signal(scene.job, USR1, "root")
        await scene.until(lambda: scene.told("a/1"))
        scene.comes_back("h1")
        await asyncio.sleep(0.2)
        assert scene.seen() == [("a/0", "h0", USR1)]
        assert scene.told("a/1") == ["SIGUSR1 may not have reached it on h1: h1 is lost"]

    play(act)


def test_what_does_not_end_by_sigterm_is_killed_after_the_grace_time(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.deaf = True
        await scene.stopping.signal(scene.job, TERM, "root")
        await scene.over()
        sent = {(c, s): at for c, _, s, at in scene.got}
        for name in ("a/0", "a/1"):
            assert sent[name, KILL] - sent[name, TERM] >= 0.3
        assert len(scene.got) == 4
        assert scene.job.code == 137

    play(act)


def test_sigkill_waits_for_nothing_and_ends_the_move(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.grace_is_far()
        move = scene.move(1, MigrationStep.FREEZING)
        scene.frozen = {"a/1"}
        cancelled: list[str] = []
        cast(Any, move).cancel = cancelled.append
        await scene.stopping.signal(scene.job, KILL, "root")
        await scene.over()
        assert sorted(scene.seen()) == [("a/0", "h0", KILL), ("a/1", "h1", KILL)]
        assert cancelled[0] == "root"

    play(act)


def test_stop_cancels_a_move_and_ends_what_trains_at_its_source_at_once(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.grace_is_far()
        move = scene.move(1, MigrationStep.PRECOPYING)
        cancelled: list[str] = []
        cast(Any, move).cancel = cancelled.append
        await scene.stopping.signal(scene.job, TERM, "alice")
        await scene.over()
        assert sorted(scene.seen()) == [("a/0", "h0", TERM), ("a/1", "h1", TERM)]
        assert cancelled[0] == "alice"

    play(act)


def test_a_capsule_whose_host_is_away_is_ended_when_it_is_back(play: Play) -> None:
    """Also when that takes longer than the grace time."""

    async def act(scene: Scene) -> None:
        scene.lose("h1")
        await scene.stopping.signal(scene.job, TERM, "root")
        await asyncio.sleep(1.0)
        assert scene.seen() == [("a/0", "h0", TERM)]
        assert scene.job.state == "ending"
        scene.comes_back("h1")
        await scene.over()
        assert scene.seen()[1:] == [("a/1", "h1", TERM)]

    play(act)


def test_an_orchestrator_that_is_started_anew_ends_what_was_to_end(play: Play) -> None:
    async def act(scene: Scene) -> None:
        for host in ("h0", "h1"):
            scene.lose(host)
        await scene.stopping.signal(scene.job, TERM, "root")
        again = Scene(scene.cluster.paths.state, Fleet(scene.cluster))
        assert again.job is not scene.job
        assert again.job.state == "ending"
        again.stopping.resume()
        await again.over()
        assert sorted(again.seen()) == [("a/0", "h0", TERM), ("a/1", "h1", TERM)]
        assert scene.got == []

    play(act)


def test_a_full_disk_keeps_no_job_from_being_stopped(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        def full(*_: object) -> None:
            raise LiveshiftError("cannot write the journal: database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(scene.fleet.journal, "set_job", full)
            await scene.stopping.signal(scene.job, TERM, "root")
        await scene.over()

    play(act)


def test_on_a_full_disk_its_processes_end_and_their_ends_are_known_once_there_is_room(
    play: Play,
) -> None:
    async def act(scene: Scene) -> None:
        scene.deaf = True  # their agents tell of their ends, below
        fill(scene.fleet.journal)
        await scene.stopping.signal(scene.job, TERM, "root")
        await scene.until(lambda: {("a/0", "h0", TERM), ("a/1", "h1", TERM)} <= set(scene.seen()))
        for capsule in scene.job.capsules.values():
            with pytest.raises(JournalError, match="is full"):
                scene.endings.capsule_ended(scene.job, capsule, 128 + TERM)
            assert capsule.code is None
        assert scene.job.state == "ending"
        empty(scene.fleet.journal)
        for capsule in scene.job.capsules.values():  # an agent tells it until it is heard
            scene.endings.capsule_ended(scene.job, capsule, 128 + TERM)
        await scene.over()
        assert scene.job.code == 128 + TERM
        assert [row[5] for row in scene.fleet.journal.capsules("a")] == [128 + TERM] * 2

    play(act)
