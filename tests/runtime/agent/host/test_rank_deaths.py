# SPDX-License-Identifier: Apache-2.0
"""How ranks of a capsule end, with real processes; their pages are stand-ins."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from liveshift.runtime.agent.host import rank_deaths
from liveshift.runtime.agent.host.rank_deaths import RankDeaths, RankEnd


class RankPage:
    """The page of one rank."""

    def __init__(self, pid: int, finished: int) -> None:
        self.pid = pid
        self.finished = finished
        self.closed = False

    def page(self) -> RankPage:
        assert not self.closed
        return self

    def close(self) -> None:
        self.closed = True


class Scene:
    """Ranks of one capsule, whose command is the process ``command``."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pages: dict[int, RankPage] = {}
        self.command = 0
        self.ended = False
        self.deaths = RankDeaths(0, lambda: self.ended)

    def rank(self, finished: int = 7) -> subprocess.Popen[bytes]:
        """A process that ends with the code that it is told."""
        process = subprocess.Popen(
            [sys.executable, "-c", "raise SystemExit(int(input()))"], stdin=subprocess.PIPE
        )
        self.processes.append(process)
        self.pages[process.pid] = RankPage(process.pid, finished)
        return process

    def heartbeat(self) -> None:
        living = [each.pid for each in self.processes if each.returncode is None]
        pages = [self.pages[pid] for pid in living]
        self.deaths.find(living, cast(Any, pages), self.open_page)
        self.deaths.follow()

    def open_page(self, pid: int, inner: int) -> Any:
        assert pid == inner, "they are children of this process"
        return self.pages[inner]

    async def end(
        self, process: subprocess.Popen[bytes], *, code: int = 0, kill: int = 0, wait: bool = True
    ) -> None:
        """End it, and wait until that was noticed; its parent waits for it only then, if ever."""
        if kill:
            process.send_signal(kill)
        else:
            assert process.stdin is not None
            process.stdin.write(b"%d\n" % code)
            process.stdin.close()
        async with asyncio.timeout(20):
            while not self.pages[process.pid].closed:
                await asyncio.sleep(0.01)
        if wait:
            process.wait()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def play(what: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await what()

    asyncio.run(run())


def test_a_killed_rank_is_known_with_its_count(scene: Scene) -> None:
    async def story() -> None:
        rank = scene.rank(finished=40)
        scene.heartbeat()
        scene.pages[rank.pid].finished = 41  # after the last heartbeat
        await scene.end(rank, kill=signal.SIGKILL)

    play(story)
    assert scene.deaths.first == RankEnd(signal.SIGKILL, 41)
    assert 0 < scene.deaths.first.ago < 60


def test_the_first_bad_end_counts(scene: Scene) -> None:
    """torchrun ends the other ranks by signals, once one has failed."""

    async def story() -> None:
        well, fails, other = scene.rank(), scene.rank(), scene.rank()
        scene.heartbeat()
        await scene.end(well, code=0)
        assert scene.deaths.first is None
        await scene.end(fails, code=3)
        await scene.end(other, kill=signal.SIGKILL)

    play(story)
    assert scene.deaths.first == RankEnd(0, 7)


def test_a_rank_in_the_place_of_a_dead_one_ends_the_matter(scene: Scene) -> None:
    """torchrun --max-restarts has started it."""

    async def story() -> None:
        rank = scene.rank()
        scene.heartbeat()
        await scene.end(rank, kill=signal.SIGSEGV)
        assert scene.deaths.first is not None
        await asyncio.sleep(2 / rank_deaths.TICKS)  # when a process began is known to a tick
        scene.rank(finished=1)
        scene.heartbeat()

    play(story)
    assert scene.deaths.first is None


def test_a_rank_that_began_before_and_is_seen_later_changes_nothing(scene: Scene) -> None:
    """It makes its first collective in the heartbeat in which its peer dies."""

    async def story() -> None:
        rank, peer = scene.rank(), scene.rank(finished=0)
        scene.heartbeat()
        await scene.end(rank, kill=signal.SIGSEGV)
        scene.pages[peer.pid].finished = 1
        scene.heartbeat()

    play(story)
    assert scene.deaths.first == RankEnd(signal.SIGSEGV, 7)


@pytest.mark.parametrize("command_ended", [False, True])
def test_an_end_that_the_command_outlives_was_wanted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, command_ended: bool
) -> None:
    """The program ends a helper of its own. Later a rank of it is killed."""

    async def story() -> None:
        helper, rank = scene.rank(), scene.rank()
        scene.heartbeat()
        await scene.end(helper, kill=signal.SIGTERM)
        assert scene.deaths.first == RankEnd(signal.SIGTERM, 7)
        later = rank_deaths._now() + rank_deaths.OUTLIVED_S + 1
        monkeypatch.setattr(rank_deaths, "_now", lambda: later)
        scene.ended = command_ended
        scene.heartbeat()
        await scene.end(rank, kill=signal.SIGSEGV)

    play(story)
    first = signal.SIGTERM if command_ended else signal.SIGSEGV
    assert scene.deaths.first == RankEnd(first, 7)


def test_what_the_kernel_kills_of_an_ended_capsule_was_not_killed_by_a_fault(scene: Scene) -> None:
    async def story() -> None:
        rank = scene.rank()
        scene.heartbeat()
        scene.ended = True
        await scene.end(rank, kill=signal.SIGKILL)

    play(story)
    assert scene.deaths.first is None


def test_the_command_itself_may_be_a_rank(scene: Scene) -> None:
    """Its death is the end of the command, so that is known before the rank's."""

    async def story() -> None:
        rank = scene.rank()
        scene.deaths = RankDeaths(rank.pid, lambda: True)
        scene.heartbeat()
        await scene.end(rank, kill=signal.SIGKILL)

    play(story)
    assert scene.deaths.first == RankEnd(signal.SIGKILL, 7)


def test_a_zombie_is_no_new_rank(scene: Scene) -> None:
    async def story() -> None:
        killed, fails = scene.rank(finished=40), scene.rank()
        scene.heartbeat()
        await scene.end(killed, kill=signal.SIGKILL, wait=False)
        scene.heartbeat()
        assert scene.deaths.first == RankEnd(signal.SIGKILL, 40)
        await scene.end(fails, code=1)

    play(story)
    assert scene.deaths.first == RankEnd(signal.SIGKILL, 40)


def test_a_process_without_collectives_is_no_rank(scene: Scene) -> None:
    async def story() -> None:
        scene.rank(finished=0)
        gc.collect()
        before = os.listdir("/proc/self/fd")
        scene.heartbeat()
        assert os.listdir("/proc/self/fd") == before

    play(story)
    assert scene.deaths.first is None


def test_nothing_is_left_open(scene: Scene) -> None:
    async def story() -> None:
        ranks = [scene.rank() for _ in range(3)]
        gc.collect()  # it would close what earlier tests of this process have left
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            scene.heartbeat()
        assert len(os.listdir("/proc/self/fd")) == before + 3, "one descriptor for each"
        for rank in ranks:
            await scene.end(rank, code=1)
        assert len(os.listdir("/proc/self/fd")) == before - 3, "and the pipes to them"

    play(story)
    assert all(page.closed for page in scene.pages.values())
