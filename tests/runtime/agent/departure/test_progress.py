# SPDX-License-Identifier: Apache-2.0
"""Words about the progress of a pre-copy: what they count, how often, and that nobody waits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from liveshift.errors import Unreachable
from liveshift.runtime.agent.departure.progress import ReportSender, RoundsReporter
from liveshift.runtime.messages import Message, Progressed

MB = 1_000_000


class Told:
    """A reporter on a clock of its own, and what it said."""

    def __init__(self, carries: float = 0.0) -> None:
        self.now = 100.0
        self.words: list[Progressed] = []
        self.reporter = RoundsReporter(self.words.append, "m7", 0.25, lambda: self.now, carries)

    def begin(self, number: int, size: int) -> None:
        """A round begins, and its list of ``size`` bytes is there at once."""
        self.reporter.round_began(number)
        self.reporter.listed(size)

    def send(self, seconds: float, size: int, chunks: int = 10) -> None:
        """``size`` bytes in so many seconds, evenly."""
        for _ in range(chunks):
            self.now += seconds / chunks
            self.reporter.moved(size // chunks)

    def rate(self) -> float:
        """The rate that it says now."""
        self.reporter.done()
        return self.words[-1].rate


def test_a_word_says_all_there_is() -> None:
    told = Told()
    told.begin(1, 400 * MB)
    told.send(1.0, 200 * MB)
    told.reporter.done()
    near: Any = pytest.approx(200 * MB, rel=0.01)
    assert told.words[-1] == Progressed(
        "m7", 1, 200 * MB, 400 * MB, 200 * MB, near, None, None, near
    )
    told.send(1.0, 200 * MB)
    told.reporter.round_ended(400 * MB)
    told.begin(2, 100 * MB)
    told.send(0.5, 60 * MB)
    told.reporter.round_ended(60 * MB, slow_down=0.05)
    told.reporter.done()
    last = told.words[-1]
    assert (last.round, last.bytes, last.dirty, last.left) == (2, 460 * MB, 60 * MB, 0)
    assert last.slow_down == 0.05
    assert last.delta_s == pytest.approx(0.5)  # 60 MB at the rate of the second round, 120 MB/s


def test_a_first_round_tells_nothing_of_what_a_stop_takes() -> None:
    told = Told()
    told.begin(1, 400 * MB)
    told.send(1.0, 400 * MB)
    told.reporter.round_ended(400 * MB)
    told.reporter.done()
    assert told.words[-1].delta_s is None


def test_what_is_to_be_sent_may_be_known_late() -> None:
    told = Told()
    told.reporter.round_began(1)
    told.send(1.0, 10 * MB)
    told.reporter.listed(100 * MB)
    told.send(1.0, 30 * MB)
    told.reporter.done()
    assert (told.words[-1].dirty, told.words[-1].left) == (100 * MB, 60 * MB)
    told.reporter.round_ended(100 * MB)  # zeros, for example, need not be sent
    told.reporter.done()
    assert (told.words[-1].dirty, told.words[-1].left) == (100 * MB, 0)


def test_more_than_was_expected_leaves_nothing_over() -> None:
    told = Told()
    told.begin(1, 10 * MB)
    told.send(1.0, 30 * MB)
    told.reporter.done()
    assert (told.words[-1].left, told.words[-1].bytes) == (0, 30 * MB)


def test_at_most_four_words_a_second_and_the_last_one_at_once() -> None:
    told = Told()
    told.begin(1, 100 * MB)
    told.send(2.0, 100 * MB, chunks=100)
    assert 8 <= len(told.words) <= 9
    before = len(told.words)
    told.reporter.moved(1)
    told.reporter.done()
    assert len(told.words) == before + 1
    assert told.words[-1].bytes == 100 * MB + 1


def test_the_rate_is_that_of_the_last_second() -> None:
    told = Told()
    told.begin(1, 1000 * MB)
    told.send(3.0, 900 * MB, chunks=30)
    assert told.rate() == pytest.approx(300 * MB, rel=0.01)
    told.reporter.round_ended(900 * MB)
    told.begin(2, 20 * MB)
    told.send(2.0, 20 * MB, chunks=20)
    assert told.rate() == pytest.approx(10 * MB, rel=0.15)
    told.reporter.round_ended(20 * MB)
    told.begin(3, 6 * MB)
    told.send(0.02, 6 * MB)  # this round is too short to show a rate
    told.reporter.round_ended(6 * MB)
    told.reporter.done()
    assert told.words[-1].delta_s == pytest.approx(0.6)  # at the second round's 10 MB/s


def test_a_link_that_was_measured_at_a_bad_moment_is_believed_by_what_it_carries() -> None:
    """The measurement takes half a second. Something else may have had all cores meanwhile; then a
    stop seemed to take half a minute, and the move was given up. Each round took less than a
    quarter of a second."""
    told = Told(carries=3.7 * MB)
    told.begin(1, 120 * MB)
    told.send(0.4, 120 * MB)
    told.reporter.round_ended(120 * MB)
    for number, best in ((2, 3.7), (3, 450)):
        told.begin(number, 90 * MB)
        told.send(0.2, 90 * MB)
        told.reporter.round_ended(90 * MB)
        told.reporter.done()
        assert told.words[-1].best == pytest.approx(best * MB)
    assert told.words[-1].delta_s == pytest.approx(0.2)


def test_a_stop_is_reckoned_with_what_the_way_is_known_to_carry() -> None:
    told = Told(carries=1000 * MB)
    told.begin(2, 100 * MB)
    told.send(1.0, 100 * MB)  # paced
    told.reporter.round_ended(100 * MB)
    told.reporter.done()
    assert told.words[-1].delta_s == pytest.approx(0.1)
    assert told.words[-1].best == 1000 * MB
    told.begin(3, 2000 * MB)
    told.send(0.5, 1500 * MB)  # into what is on its way
    told.reporter.done()
    assert told.words[-1].best == 1000 * MB
    told.send(0.5, 500 * MB)
    told.reporter.round_ended(2000 * MB)
    told.reporter.done()
    assert told.words[-1].best == pytest.approx(2000 * MB), "it was more after all"


def test_threads_lose_no_byte() -> None:
    words: list[Progressed] = []
    reporter = RoundsReporter(words.append, "m7", 0.0)
    reporter.round_began(1)
    reporter.listed(40_000)

    def count() -> None:
        for _ in range(5000):
            reporter.moved(2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reporter.done()
    assert (words[-1].bytes, words[-1].left) == (40_000, 0)


def word(migration: str, size: int) -> Progressed:
    return Progressed(migration, 1, size, 0, 0, 0.0)


def test_the_newest_word_of_each_migration_arrives() -> None:
    async def play() -> list[Message]:
        came: list[Message] = []
        first, all_said, rest = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def ask(message: Message, _timeout: float) -> None:
            came.append(message)
            if len(came) == 1:
                first.set()
                await all_said.wait()  # a slow orchestrator
            if len(came) == 3:
                rest.set()

        teller = ReportSender(ask, 5.0)
        teller(word("m1", 1))
        await first.wait()

        def tell_all() -> None:
            for n in range(2, 100):
                teller(word("m1", n))

        await asyncio.to_thread(tell_all)
        await asyncio.to_thread(teller, word("m2", 7))
        all_said.set()
        await rest.wait()
        return came

    came = asyncio.run(asyncio.wait_for(play(), 20))
    assert came[0] == word("m1", 1)
    assert sorted(came[1:], key=str) == [word("m1", 99), word("m2", 7)]


def test_a_word_that_is_lost_stops_nobody() -> None:
    async def play() -> list[int]:
        tried: list[int] = []
        second = asyncio.Event()

        async def ask(message: Message, _timeout: float) -> None:
            assert isinstance(message, Progressed)
            tried.append(message.bytes)
            if message.bytes == 2:
                second.set()
            raise Unreachable("the orchestrator is away")

        teller = ReportSender(ask, 5.0)
        teller(word("m1", 1))
        while not tried:
            await asyncio.sleep(0)
        teller(word("m1", 2))
        await second.wait()
        return tried

    assert asyncio.run(asyncio.wait_for(play(), 20)) == [1, 2]


def test_words_after_the_end_of_the_loop_are_nothing() -> None:
    async def make() -> ReportSender:
        async def ask(_message: Message, _timeout: float) -> None:
            raise AssertionError

        return ReportSender(ask, 1.0)

    asyncio.run(make())(word("m1", 1))
