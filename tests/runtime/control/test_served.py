# SPDX-License-Identifier: Apache-2.0
"""A peer's asks: each served once, answers kept within bounds, and said so when they are not."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveshift.errors import NotFound
from liveshift.runtime import messages
from liveshift.runtime.control import served
from liveshift.runtime.control.served import Served
from liveshift.runtime.messages import Message


class Peer:
    """Asks by number; ``answers`` are the frames that came back."""

    def __init__(self, largest: int = 1 << 30) -> None:
        self.served = Served("h0", largest)
        self.calls: list[int] = []
        self.answers: list[messages.Frame] = []
        self.size = 0

    def ask(self, number: int) -> None:
        async def serve() -> Message | None:
            self.calls.append(number)
            return messages.Output(b"x" * self.size, number, None)

        self.served.accept(number, 10, "End", serve, lambda raw: self.answers.append(decoded(raw)))

    async def asked(self, number: int) -> messages.Frame:
        self.ask(number)
        while self.served._under_way:
            await asyncio.sleep(0)
        return self.answers[-1]


def decoded(raw: bytes) -> messages.Frame:
    return messages.decode(raw)


def test_what_was_forgotten_is_not_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "KEPT_ANSWERS", 3)

    async def scene() -> None:
        peer = Peer()
        for number in range(100, 110):
            await peer.asked(number)
        assert len(peer.served._answered) == 3
        for number in range(100, 107):
            error = (await peer.asked(number)).error
            assert error is not None
            assert error[0] == "Unreachable"
            assert "may have been served: its answer was lost" in error[1]
        assert (await peer.asked(108)).answer == messages.Output(b"", 108, None)
        assert peer.calls == list(range(100, 110))
        # Another life of the peer begins anywhere else, and is not held to that.
        for number in (1 << 30, 1 << 47, (1 << 30) - 1):
            assert (await peer.asked(number)).answer == messages.Output(b"", number, None)

    asyncio.run(scene())


def test_old_answers_go_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "KEPT_S", 0.0)

    async def scene() -> None:
        peer = Peer()
        for number in range(100):
            await peer.asked(number)
        assert len(peer.served._answered) <= 2
        await peer.asked(5)
        assert peer.calls.count(5) == 1

    asyncio.run(scene())


def test_a_long_answer_is_not_kept_and_does_not_displace_short_ones() -> None:
    async def scene() -> None:
        peer = Peer()
        await peer.asked(1)
        peer.size = served.KEPT_BYTES
        assert (await peer.asked(2)).answer is not None
        assert "was lost" in ((await peer.asked(2)).error or ("", ""))[1]
        assert (await peer.asked(1)).answer == messages.Output(b"", 1, None)
        assert peer.calls == [1, 2]

    asyncio.run(scene())


def test_an_answer_longer_than_the_peer_takes_is_an_error_to_it() -> None:
    async def scene() -> None:
        peer = Peer(largest=1000)
        peer.size = 2000
        error = (await peer.asked(1)).error
        assert error is not None
        assert "too many to send" in error[1]

    asyncio.run(scene())


def test_an_error_is_repeated_like_an_answer() -> None:
    async def scene() -> None:
        line = Served("h0", 1000)
        calls: list[int] = []
        frames: list[bytes] = []

        async def serve() -> Message | None:
            calls.append(1)
            raise NotFound("no such capsule", hint="look elsewhere")

        for _ in range(3):
            line.accept(9, 10, "End", serve, frames.append)
            while line._under_way:
                await asyncio.sleep(0)
        assert len(calls) == 1
        assert len(frames) == 3
        assert decoded(frames[2]).error == ("NotFound", "no such capsule", "look elsewhere")

    asyncio.run(scene())


def test_frames_under_way_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MOST_BYTES", 25)

    async def scene() -> None:
        peer = Peer()
        for number in (1, 2, 3):  # of 10 bytes each, none served yet
            peer.ask(number)
        assert (peer.answers[0].error or ("",))[0] == "Refused"
        while peer.served._under_way:
            await asyncio.sleep(0)
        assert peer.calls == [1, 2]
        assert (await peer.asked(3)).answer is not None, "it was not served: it may ask again"

    asyncio.run(scene())


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 60), st.booleans()), min_size=1, max_size=60
    )
)
def test_whatever_comes_nothing_is_served_twice_and_the_books_agree(
    asks: list[tuple[int, int, bool]],
) -> None:
    """Numbers repeated and out of order, answers of all sizes, some asked while others wait."""

    async def scene() -> None:
        peer = Peer()
        for number, size, wait in asks:
            peer.size = size
            peer.ask(number)
            while wait and peer.served._under_way:
                await asyncio.sleep(0)
        while peer.served._under_way:
            await asyncio.sleep(0)
        assert len(peer.calls) == len(set(peer.calls))
        kept = [answer.raw for answer in peer.served._answered.values()]
        assert sum(map(len, kept)) == peer.served._kept <= served.KEPT_BYTES
        assert len(kept) <= served.KEPT_ANSWERS
        assert peer.served._bytes == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "KEPT_BYTES", 150)
        patch.setattr(served, "KEPT_ANSWERS", 5)
        asyncio.run(scene())
