# SPDX-License-Identifier: Apache-2.0
"""What a source sends also comes into an inbox of its own host, and an error there costs only that
copy."""

from __future__ import annotations

import logging

import pytest

from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure.own_copy import OwnCopy


class Taker:
    """An inbox that notes what it gets."""

    def __init__(self) -> None:
        self.took: list[tuple[str, bytes]] = []
        self.fails = False
        self.closed = 0

    def write(self, stream: str, data: memoryview) -> None:
        if self.fails:
            raise StepFailed("ship", "this host has no memory for more")
        self.took.append((stream, bytes(data)))

    def take_pages(self, chunk: memoryview) -> None:
        self.write("pages", chunk)

    def close(self) -> None:
        self.closed += 1


def test_it_gets_all_that_is_sent() -> None:
    inbox = Taker()
    copy = OwnCopy("s17.1", inbox)
    copy.stream("image:core-1.img", b"registers")
    copy.pages(memoryview(b"chunk"))
    copy.stream("image:core-1.img", b"")
    assert inbox.took == [
        ("image:core-1.img", b"registers"),
        ("pages", b"chunk"),
        ("image:core-1.img", b""),
    ]


def test_an_error_ends_the_copy_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Taker()
    copy = OwnCopy("s17.1", inbox)
    inbox.fails = True
    with caplog.at_level(logging.WARNING):
        copy.pages(memoryview(b"chunk"))
    inbox.fails = False
    copy.stream("memory", b"table")
    assert (inbox.took, inbox.closed) == ([], 1)
    assert "s17.1: its copy is lost" in caplog.text
    assert "no memory for more" in caplog.text


def test_a_copy_that_is_given_up_takes_nothing_more_whatever_its_inbox_does() -> None:
    inbox = Taker()
    copy = OwnCopy("s17.1", inbox)
    inbox.close = lambda: 1 // 0  # type: ignore[method-assign,assignment]
    copy.give_up("this host does not have what its holder has")
    copy.pages(memoryview(b"chunk"))
    assert inbox.took == []
