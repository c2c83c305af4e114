# SPDX-License-Identifier: Apache-2.0
"""What the destination has not found by its name is asked for, and comes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from wire_ends import LIMIT, Inbox, impatient, key_directory, quick, receiver, senders
from wire_mishaps import Fate, MiddleMan, losing_answers, sometimes

from liveshift.errors import LiveshiftError, StepFailed
from liveshift.runtime.wire import PageStreams, Sender
from liveshift.runtime.wire.wants import MOST, PAGES, pack_wants, read_wants

__all__ = ["impatient", "key_directory", "quick", "senders"]

Senders = Callable[..., Sender]
WANTED = [(7, 0x7F00_0000_0000, 3), (1 << 31, 4096, 1)]


def nothing(_: memoryview) -> None:
    raise AssertionError("no page was sent")


def wanting(key_directory: Path, *wanted: list[tuple[int, int, int]]) -> tuple[str, Inbox]:
    """A destination that wants the one after the other, and then nothing more."""
    here, endpoint = receiver(key_directory)
    inbox, left = Inbox(), list(wanted)
    pages = PageStreams(nothing, lambda: left.pop(0) if left else [])
    here.expect("m1", "h0", inbox, LIMIT, pages, 1)
    return endpoint, inbox


def test_it_is_told_what_is_wanted_whatever_else_goes_on(
    key_directory: Path, senders: Senders
) -> None:
    endpoint, inbox = wanting(key_directory, WANTED, WANTED[:1])
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    for n in range(20):
        sender.send("output", bytes([n]))
    assert sender.wants() == WANTED
    sender.send("output", b"more")
    assert sender.wants() == WANTED[:1]
    assert sender.wants() == []
    sender.finish()
    assert inbox.streams["output"] == bytes(range(20)) + b"more", "a question is no chunk"
    inbox.complete = True
    assert sender.wants() == []


def test_as_much_as_one_answer_holds(key_directory: Path, senders: Senders) -> None:
    many = [(9, n * 8192, 1) for n in range(MOST + 5)]
    endpoint, _ = wanting(key_directory, many, many[MOST:])
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    assert sender.wants() == many[:MOST]
    assert sender.wants() == many[MOST:]


@pytest.mark.parametrize(
    "fate", [sometimes("lose", 0.5), sometimes("repeat", 1), losing_answers(0.5)]
)
def test_a_question_that_is_lost_is_asked_again(
    key_directory: Path, senders: Senders, quick: None, fate: Fate
) -> None:
    here, endpoint = receiver(key_directory)
    pages = PageStreams(nothing, lambda: WANTED)
    here.expect("m1", "h0", Inbox(), LIMIT, pages, 1)
    middle = MiddleMan(key_directory, endpoint, fate)
    sender = senders("m1", middle.endpoint, key_directory, "h0", "h1")
    for _ in range(8):
        assert sender.wants() == WANTED
    sender.send("output", b"x")
    sender.finish()
    middle.close()
    assert middle.mishaps


def test_a_destination_that_cannot_say_ends_the_move(key_directory: Path, senders: Senders) -> None:
    here, endpoint = receiver(key_directory)
    here.expect("m1", "h0", Inbox(), LIMIT)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    with pytest.raises(StepFailed, match="no pages of memory were announced"):
        sender.wants()


def test_a_silent_destination_is_given_up(
    key_directory: Path, senders: Senders, impatient: None
) -> None:
    sender = senders("m1", "tcp://127.0.0.1:9", key_directory, "h0", "h1", patience=0.5)
    with pytest.raises(StepFailed, match=r"no image bytes for 0\.5 s"):
        sender.wants()


PACKED = pack_wants(3, WANTED)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        PACKED[:7],
        PACKED[:-1],
        PACKED + struct.pack("<IIQ", 1, 1, 5),
        PACKED + struct.pack("<IIQ", 1, 0, 4096),
        PACKED + struct.pack("<IIQ", 1, 2, (1 << 47) - 4096),
        PACKED + struct.pack("<IIQ", 1, 1, 1 << 63),
        struct.pack("<Q", 1) + struct.pack("<IIQ", 1, (1 << 28) // 2 + 1, 0) * 2,
    ],
)
def test_answers_that_no_destination_gives(raw: bytes) -> None:
    assert read_wants(PACKED) == WANTED
    with pytest.raises(
        LiveshiftError, match=r"an answer names (?:invalid|more than)|not an answer that names"
    ):
        read_wants(raw)


def test_no_answer_asks_for_more_than_the_source_would_list() -> None:
    packed = pack_wants(1, [(7, 4096, PAGES - 2), (8, 4096, 5), (9, 4096, 1)])
    assert read_wants(packed) == [(7, 4096, PAGES - 2), (8, 4096, 2)]
    greedy = packed + struct.pack("<IIQ", 9, 1, 4096)
    with pytest.raises(LiveshiftError, match=f"more than {PAGES} pages"):
        read_wants(greedy)
