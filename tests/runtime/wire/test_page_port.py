# SPDX-License-Identifier: Apache-2.0
"""The port for pages: what anybody may say to it, and what listening and saying again is good for.

That nothing was answered shows in the answer to what comes after it on the same connection: it is
the first one, number 0.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from wire_ends import LIMIT, Inbox, Source, impatient, key_directory, quick, receiver, senders
from wire_pages import STREAMS, Slots, Store, expecting, lanes_to, send_all
from zmq.utils.monitor import recv_monitor_message

from liveshift.errors import StepFailed
from liveshift.runtime.control import keys
from liveshift.runtime.wire import CHUNK, Lanes, PageStreams, Receiver, Sender
from liveshift.runtime.wire.announced import IncomingSeal
from liveshift.runtime.wire.header import HEADER, PageHeader
from liveshift.runtime.wire.page_lane import ANSWER
from liveshift.runtime.wire.seal import TAG, Sealer, make_key

__all__ = ["impatient", "key_directory", "lanes_to", "quick", "senders"]

PAGE = PageHeader("m1", 1, 0, "memory", 0)
DATA = bytes(range(8)) + b"a page"


def raw(header: PageHeader) -> bytes:
    return msgspec.msgpack.encode(header)


def under(key: bytes, header: PageHeader, data: bytes = DATA, direction: str = "pages") -> bytes:
    into = memoryview(bytearray(len(data) + TAG))
    sealer = Sealer(key, direction)  # type: ignore[arg-type]
    return bytes(sealer.seal(header.lane, header.number, raw(header), data, into))


def two_arriving(key_directory: Path) -> tuple[Receiver, Store, Store]:
    """m1 and m2, both from h0."""
    here, store, _ = expecting(key_directory)
    other = Store()
    here.expect("m2", "h0", Inbox(), LIMIT, PageStreams(other), STREAMS)
    return here, store, other


def test_what_does_not_open_is_neither_taken_nor_answered(
    key_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, store, other = two_arriving(key_directory)
    with Source(here, key_directory) as source, Source(here, key_directory, "m2") as second:
        good = source.chunk(PAGE, DATA)
        head, body = good
        flipped = [bytes([body[0] ^ 1]) + body[1:], body[:-1] + bytes([body[-1] ^ 1])]
        elsewhere = [
            PageHeader("m2", 1, 0, "memory", 0),
            PageHeader("m1", 2, 0, "memory", 0),
            PageHeader("m1", 1, 1, "memory", 0),
            PageHeader("m1", 1, 0, "rate", 0),
            PageHeader("m1", 1, 0, "memory", 20),
            PageHeader("m9", 1, 0, "memory", 0),
        ]
        bad = [
            *([head, other] for other in (*flipped, body[:-1], body + b"\0", b"", DATA)),
            *([raw(header), body] for header in elsewhere),
            [head, under(make_key(), PAGE)],
            [head, under(source.key, PAGE, direction="answers")],
            [head, under(second.key, PAGE)],
            [head],
            [head, body, b"more"],
            [b"", body],
            [b"\xff" * 50, body],
            [head + b"\0", body],
            [os.urandom(HEADER + 1), body],
            [head, os.urandom(CHUNK + TAG)],
        ]
        for frames in bad:
            assert source.say(frames, wait_s=0) is None
        assert source.say(good) == ("ack", 0)
        assert second.say(second.chunk(PageHeader("m2", 1, 0, "memory", 0), DATA)) == ("ack", 0)
        assert len(source.answers) == len(second.answers) == 1, "nothing was answered before"
    assert list(store.chunks.values()) == [DATA] == list(other.chunks.values())
    told = [r for r in caplog.records if "came to the port for pages" in r.getMessage()]
    assert 1 <= len(told) < 6, "at most once a second"


def test_what_was_heard_and_is_said_again_is_written_once(key_directory: Path) -> None:
    here, store, _ = expecting(key_directory)
    with Source(here, key_directory) as source:
        chunks = [source.chunk(PageHeader("m1", 1, n, "memory", 0), DATA) for n in range(3)]
        assert source.say(chunks[0]) == ("ack", 0)
        assert source.say(chunks[2]) == ("again", 1)
        assert source.say(chunks[0]) == ("ack", 0)
        assert store.writes == 1
        assert source.say(chunks[1]) == ("ack", 1)
        assert source.say(chunks[2]) == ("ack", 2)
        assert source.say(chunks[1]) == ("ack", 2)
        first = source.answers[0]
        assert source.answers == list(range(first, first + 6)), "no number seals two answers"
    assert store.writes == 3


def test_a_new_key_ends_the_one_before_and_an_old_word_does_not_bring_it_back(
    key_directory: Path, lanes_to: Callable[..., Lanes], quick: None
) -> None:
    here, store, _ = expecting(key_directory)
    with Source(here, key_directory) as source:
        assert source.say(source.chunk(PAGE, DATA)) == ("ack", 0)
        later = source.chunk(PageHeader("m1", 1, 1, "memory", 0), DATA)
        first, source.key = source.key, make_key()
        source.sender.seal(source.key)
        entry = here._open["m1"]
        assert entry.seal is not None
        seal = entry.seal
        source.sender.seal(source.key)
        assert entry.seal is seal, "said again it goes on, with its numbers"
        source.sender._lane._questions = 0
        source.sender.seal(first)
        assert entry.seal is seal
        assert source.say(later, wait_s=0) is None
        source.renew()
        assert source.say(source.chunk(PAGE, DATA)) == ("ack", 0)
    assert store.writes == 2


def test_lanes_whose_key_was_forgotten_fail_soon(
    key_directory: Path, lanes_to: Callable[..., Lanes], quick: None
) -> None:
    """So it is with an agent that has been started anew."""
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    slots = Slots(store, 20)
    send_all(slots, lanes, range(10))
    here.forget("m1")
    with pytest.raises(StepFailed, match="h0 sent an image for m1, which was not announced"):
        send_all(slots, lanes, range(10, 20))
    lanes.close()
    assert slots.released == [1] * 20


def test_a_key_that_was_revoked_brings_no_more_pages(
    key_directory: Path, lanes_to: Callable[..., Lanes], quick: None
) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    slots = Slots(store, 20)
    send_all(slots, lanes, range(10))
    keys.revoke(key_directory, "h0")
    with pytest.raises(StepFailed, match="a key that this host no longer knows"):
        send_all(slots, lanes, range(10, 20))
    assert sorted(store.chunks) == list(range(10))


def test_a_key_comes_from_the_announced_source_only(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, _, _ = expecting(key_directory)
    endpoint = f"tcp://{here.address}"
    for migration, host in (("m1", "h2"), ("m9", "h0")):
        stranger = senders(migration, endpoint, key_directory, host, "h1")
        with pytest.raises(StepFailed, match="which was not announced"):
            stranger.seal(make_key())
    short = senders("m1", endpoint, key_directory, "h0", "h1")
    with pytest.raises(StepFailed, match="the key has 31 bytes"):
        short.seal(bytes(31))
    assert here._open["m1"].seal is None


def test_addresses_of_no_host_are_turned_away(key_directory: Path) -> None:
    here, _ = receiver(key_directory)
    with zmq.Context() as context:
        for own, event in (
            ("127.0.0.1", zmq.EVENT_HANDSHAKE_SUCCEEDED),
            ("127.0.0.2", zmq.EVENT_HANDSHAKE_FAILED_AUTH),
        ):
            with context.socket(zmq.DEALER) as knocker:
                knocker.linger = 0
                monitor = knocker.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_SUCCEEDED | event))
                knocker.connect(f"tcp://{own}:0;{here.pages.address}")
                assert monitor.poll(10_000)
                assert recv_monitor_message(monitor)["event"] == event
                knocker.disable_monitor()
                monitor.close()


GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
READY = b"\4\x29\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param([b"GET / HTTP/1.1\r\n\r\n"], id="another protocol"),
        pytest.param([b""], id="nothing"),
        pytest.param([GREETING[:30]], id="half a greeting"),
        pytest.param([GREETING, READY[:9]], id="half a handshake"),
        pytest.param([GREETING, READY, b"\2" + (1 << 62).to_bytes(8, "big")], id="too large"),
        pytest.param([GREETING, READY, b"\1\4head\2" + (1 << 20).to_bytes(8, "big")], id="half"),
        pytest.param([GREETING, READY, b"\1\0" * 5000], id="parts without end"),
        pytest.param([GREETING, READY, b"\0\0" * 5000], id="empty messages"),
    ],
)
def test_junk_harms_nobody(
    key_directory: Path, lanes_to: Callable[..., Lanes], junk: list[bytes]
) -> None:
    here, store, pages = expecting(key_directory)
    host, _, port = here.pages.address.partition(":")
    knockers = [socket.create_connection((host, int(port))) for _ in range(20)]
    try:
        for knocker in knockers:
            for part in junk:
                knocker.sendall(part)
                if part == READY:  # what comes now counts as messages
                    said = b""
                    while READY[2:8] not in said:
                        said += knocker.recv(4096)
        lanes = lanes_to(here)
        slots = Slots(store, 100)
        send_all(slots, lanes)
        assert slots.all_over()
        assert lanes.end() == pages.streams()
    finally:
        for knocker in knockers:
            knocker.close()


def test_an_agent_that_was_started_anew_takes_other_numbers_under_the_same_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the host's clock was set back meanwhile."""
    years = iter((2026, 2025, 1970, 1969))
    monkeypatch.setattr(time, "time_ns", lambda: (next(years) - 1970) * 31_556_952 * 10**9)
    key, lives = make_key(), []
    for _ in range(2):
        seal = IncomingSeal(key, 1, "speaker")
        lives.append([ANSWER.unpack_from(seal.answer(1, "ack", n))[0] for n in range(3)])
    assert lives[0] == sorted(lives[0])
    assert lives[0][-1] < lives[1][0], "so that the source hears the later one, too"
