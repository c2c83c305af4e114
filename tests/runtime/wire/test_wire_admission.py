# SPDX-License-Identifier: Apache-2.0
"""Who may send an image, how much of it, and what becomes of bytes that no sender sends."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
import xxhash
import zmq
from wire_ends import (
    LIMIT,
    Inbox,
    arriving,
    expected,
    impatient,
    key_directory,
    quick,
    receiver,
    send_all,
    senders,
    traffic,
)

from liveshift.errors import StepFailed
from liveshift.runtime import wire
from liveshift.runtime.control import keys
from liveshift.runtime.control.keyring import NOBODY, KnownKeys
from liveshift.runtime.model import manifest
from liveshift.runtime.wire import Sender
from liveshift.runtime.wire.header import OVERHEAD, read_answer

__all__ = ["impatient", "key_directory", "quick", "senders"]


# ---- who may send ------------------------------------------------------------------------------


def test_an_unknown_key_is_turned_away(
    key_directory: Path,
    tmp_path: Path,
    senders: Callable[..., Sender],
    impatient: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = tmp_path / "stranger"
    keys.init(stranger, ["h0", "h1"])
    shutil.copy(keys.public_path(key_directory, "h1"), keys.public_path(stranger, "h1"))
    shutil.rmtree(stranger / "hosts" / "h1.key", ignore_errors=True)
    _, endpoint, inbox = arriving(key_directory)
    sender = senders("m1", endpoint, stranger, "h0", "h1")
    with pytest.raises(StepFailed, match="h1 has taken no image bytes for 1 s"):
        send_all(sender, traffic(3, 3))
    assert not inbox.streams
    assert "turned away a peer with an unknown key" in caplog.text


@pytest.mark.parametrize(
    ("migration", "host"), [("m1", "h2"), ("m9", "h0")], ids=["another host", "not announced"]
)
def test_only_the_announced_source_may_send(
    key_directory: Path,
    senders: Callable[..., Sender],
    impatient: None,
    caplog: pytest.LogCaptureFixture,
    migration: str,
    host: str,
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    sender = senders(migration, endpoint, key_directory, host, "h1")
    words = f"{host} sent an image for {migration}, which was not announced"
    with pytest.raises(StepFailed, match=f"h1 refused the image: {words}"):
        send_all(sender, traffic(4, 3))
    assert not inbox.streams
    assert words in caplog.text


def test_a_destination_that_refuses_ends_the_move_and_no_other(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    full, fine = Inbox(), Inbox()
    full.fails = OSError(28, "No space left on device")
    here.expect("m1", "h0", full, LIMIT)
    here.expect("m2", "h0", fine, LIMIT)
    with pytest.raises(StepFailed, match=r"ship: h1 refused the image: .*No space left on device"):
        send_all(senders("m1", endpoint, key_directory, "h0", "h1"), traffic(5))
    chunks = traffic(6)
    send_all(senders("m2", endpoint, key_directory, "h0", "h1"), chunks)
    assert fine.streams == expected(chunks)


def test_an_image_that_is_finished_is_refused_at_once(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint, inbox = arriving(key_directory)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    send_all(sender, traffic(4, 3))
    here.forget("m1")
    writes = inbox.writes
    with pytest.raises(StepFailed, match="m1, which was not announced"):
        send_all(sender, traffic(4, 3))
    assert inbox.writes == writes


def test_a_key_that_was_taken_away_sends_no_more(
    key_directory: Path, senders: Callable[..., Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    send_all(sender, traffic(4, 3))
    writes = inbox.writes
    monkeypatch.setattr(KnownKeys, "owner", lambda known, frame: NOBODY)
    with pytest.raises(StepFailed, match="a key that this host no longer knows"):
        send_all(sender, traffic(4, 3))
    assert inbox.writes == writes


def test_more_than_was_announced_is_refused_before_it_is_written(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint, inbox = arriving(key_directory, 10_000)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    for _ in range(10):
        sender.send("output", bytes(1000))
    sender.finish()
    with pytest.raises(StepFailed, match="than the 10000 bytes that were announced for m1"):
        send_all(sender, [("output", b"x")])
    assert len(inbox.streams["output"]) == here.received("m1") == 10_000
    with pytest.raises(StepFailed, match="announced"):  # and so it stays
        send_all(sender, [("output", b"")])


def test_large_data_goes_in_chunks_that_are_taken(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    data = random.Random(2).randbytes(2 * wire.CHUNK + 1)
    send_all(senders("m1", endpoint, key_directory, "h0", "h1"), [("output", data)])
    assert inbox.writes == 3
    assert inbox.streams["output"] == data


def test_the_sender_knows_what_it_has_sent(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    chunks = traffic(12, 50)
    send_all(sender, chunks)
    every = {s: (len(d), xxhash.xxh3_64_intdigest(d)) for s, d in expected(chunks).items()}
    assert sender.manifest_streams() == every
    sender.send("image:late.img", b"no end mark")
    found = sender.send_manifest("gpt/1", 77, {123: 20}, {"tmp": ["b", "a\udcff"]})
    sender.finish()
    assert set(found.streams) == {*every, "image:late.img"}
    assert inbox.ended[-2:] == ["image:late.img", "manifest"]
    assert manifest.decode(inbox.streams["manifest"]) == found
    assert found.gone() == {"tmp": ["a\udcff", "b"]}


def test_a_sender_whose_last_answer_was_lost_is_told_after_a_restart(
    key_directory: Path, senders: Callable[..., Sender], quick: None
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    inbox.complete = True
    here.expect("m1", "h0", inbox, 0)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    send_all(sender, traffic(4, 3))  # as its last ones look to a receiver that has just begun
    assert inbox.writes == 0


def raw_socket(key_directory: Path, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    own = keys.load_private(key_directory, "h0")
    raw = context.socket(zmq.DEALER)
    raw.curve_serverkey = keys.public_keys(key_directory)["h1"]
    raw.curve_secretkey, raw.curve_publickey = own.secret, own.public
    raw.linger = 0
    return raw


NONSENSE = [
    [b"one frame"],
    [b"", b"bytes"],
    [b"\xc1", b"bytes"],
    [msgpack.packb(7), b"bytes"],
    [msgpack.packb(("m1", 0)), b"bytes"],
    [msgpack.packb(("m1", "0", "output", 0)), b"bytes"],
    [msgpack.packb(("m1", -1, "output", 0)), b"bytes"],
    [msgpack.packb(("m1", 0, "", 0)), b"bytes"],
    [msgpack.packb(("m1", 0, "x" * 9000, 0)), b"bytes"],
    [b"\x91" * 8000, b"bytes"],
    [msgpack.packb(("m1", 0, "output", 0)), b"bytes", b"more"],
]


def test_what_no_sender_would_say_is_refused_and_does_not_stop_the_receiver(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    with zmq.Context() as context, raw_socket(key_directory, context) as raw:
        raw.connect(endpoint)
        for frames in NONSENSE:
            raw.send_multipart(frames)
            assert raw.poll(10_000), f"no answer to {frames}"
            assert read_answer(raw.recv())[0] == "refused"
    assert not inbox.streams
    chunks = traffic(7, 20)
    send_all(senders("m1", endpoint, key_directory, "h0", "h1"), chunks)
    assert inbox.streams == expected(chunks)


def test_a_chunk_that_is_too_large_costs_its_sender_the_connection(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    with zmq.Context() as context, raw_socket(key_directory, context) as raw:
        events = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.connect(endpoint)
        data = bytes(wire.CHUNK + OVERHEAD + 1)
        digest = xxhash.xxh3_64_intdigest(data)
        raw.send_multipart([msgpack.packb(("m1", 0, "output", digest)), data])
        assert events.poll(10_000), "it was taken"
        raw.disable_monitor()
        events.close()
    assert not inbox.streams
    chunks = traffic(7, 20)
    send_all(senders("m1", endpoint, key_directory, "h0", "h1"), chunks)
    assert inbox.streams == expected(chunks)


@pytest.mark.parametrize(
    "answer", [b"", b"\xc1", b"\x91" * 5000, *map(msgpack.packb, (7, ("ack",), ("ack", None)))]
)
def test_an_answer_that_no_destination_gives_ends_the_move(
    key_directory: Path, senders: Callable[..., Sender], answer: bytes
) -> None:
    theirs = keys.load_private(key_directory, "h1")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as there:
        there.curve_server = True
        there.curve_secretkey, there.curve_publickey = theirs.secret, theirs.public
        there.linger = 0
        port = there.bind_to_random_port("tcp://127.0.0.1")
        sender = senders("m1", f"tcp://127.0.0.1:{port}", key_directory, "h0", "h1")
        sender.send("output", b"x")
        who, *_ = there.recv_multipart()
        there.send_multipart([who, answer])
        with pytest.raises(StepFailed, match="ship: h1 sent an invalid answer: an answer is not"):
            sender.finish()
