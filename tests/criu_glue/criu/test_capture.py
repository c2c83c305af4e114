# SPDX-License-Identifier: Apache-2.0
"""Dump, hold, thaw and restore: CRIU's image stream by a stand-in, and then real CRIU in
sandboxes."""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured import Sink, sink

from liveshift.criu_glue.criu.capture import Capture
from liveshift.errors import StepFailed

__all__ = ["sink"]


class Writer:
    """CRIU's side of ``--stream`` (criu: img-streamer.c)."""

    def __init__(self, images: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(images / "streamer-capture.sock"))

    def open(self, name: str) -> int:
        """Announce an image and hand its pipe over; returns the end to write to."""
        read, write = os.pipe()
        message = b"\x0a" + bytes([len(name)]) + name.encode()
        self._socket.sendall(struct.pack("<I", len(message)) + message)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read]))
        self._socket.sendmsg([b"\0"], [rights])
        os.close(read)
        return write

    def image(self, name: str, data: bytes) -> None:
        with os.fdopen(self.open(name), "wb") as pipe:
            pipe.write(data)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def stream(tmp_path: Path, sink: Sink) -> Iterator[tuple[Capture, Writer]]:
    capture = Capture(tmp_path, sink)
    writer = Writer(tmp_path)
    yield capture, writer
    writer.close()
    capture.close()


def test_images_open_at_the_same_time_arrive_whole(
    stream: tuple[Capture, Writer], sink: Sink
) -> None:
    capture, writer = stream
    rng = random.Random(3)
    sent = {f"pages-{n}.img": rng.randbytes(rng.randint(0, 700_000)) for n in range(8)}
    pipes = {name: writer.open(name) for name in sent}
    left = {name: memoryview(data) for name, data in sent.items()}
    while left:
        name = rng.choice(list(left))
        left[name] = left[name][os.write(pipes[name], left[name][:50_000]) :]
        if not left[name]:
            os.close(pipes.pop(name))
            del left[name]
    capture.wait_idle(10)
    assert {name: bytes(data) for name, data in sink.images.items()} == sent
    assert sink.ended == set(sent)
    assert capture.bytes == sum(map(len, sent.values()))


def test_idle_means_that_nothing_announced_is_on_its_way(
    stream: tuple[Capture, Writer], sink: Sink
) -> None:
    capture, writer = stream
    for n in range(1500):
        writer.image(f"core-{n}.img", b"x" * n)
        capture.wait_idle(10)
        assert f"core-{n}.img" in sink.ended


def announce(writer: Writer, message: bytes, *descriptors: int) -> None:
    connection = writer._socket
    connection.sendall(struct.pack("<I", len(message)) + message)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([b"\0"], [rights] if descriptors else [])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "announces an image in 0 bytes"),
        (bytes(5000), "announces an image in 5000 bytes"),
        (b"\x08\x01", "an unknown message"),
        (b"\x0a\x7fcore", "an unknown message"),
        (b"\x0a\x04\xff\xff\xff\xff", "an unknown message"),
        (b"\x0a\x04core", "sent no pipe for it"),
    ],
)
def test_announcements_that_criu_does_not_make(
    stream: tuple[Capture, Writer], message: bytes, words: str
) -> None:
    capture, writer = stream
    with contextlib.suppress(BrokenPipeError):  # it may have hung up before the second part
        announce(writer, message)
    with pytest.raises(StepFailed, match=words):
        capture.wait_idle(10)


def test_only_a_pipe_is_read_from(stream: tuple[Capture, Writer], tmp_path: Path) -> None:
    capture, writer = stream
    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open() as file:
        announce(writer, b"\x0a\x04core", file.fileno())
        with pytest.raises(StepFailed, match="sent no pipe for it"):
            capture.wait_idle(10)


def test_a_slow_sink_holds_the_writer_back(stream: tuple[Capture, Writer], sink: Sink) -> None:
    capture, writer = stream
    sink.pause_s = 0.01
    began = time.monotonic()
    writer.image("pages-1.img", bytes(20 << 20))
    assert time.monotonic() - began > 0.05
    capture.wait_idle(10)
    assert len(sink.images["pages-1.img"]) == 20 << 20


def test_an_image_that_never_ends_is_named(stream: tuple[Capture, Writer]) -> None:
    capture, writer = stream
    pipe = writer.open("fdinfo-2.img")
    with pytest.raises(TimeoutError, match=r"fdinfo-2\.img"):
        capture.wait_idle(0.2)
    os.close(pipe)


def test_what_the_sink_raises_reaches_who_waits_and_stops_the_writer(
    stream: tuple[Capture, Writer], sink: Sink
) -> None:
    capture, writer = stream
    sink.fails = StepFailed("ship", "h2 refused the image")
    pipe = writer.open("pages-1.img")
    os.write(pipe, b"x")
    with pytest.raises(StepFailed, match="h2 refused the image"):
        capture.wait_idle(10)
    with pytest.raises(BrokenPipeError):
        os.write(pipe, bytes(1 << 20))
    os.close(pipe)


def test_closing_again_touches_nothing_that_is_open_since(
    stream: tuple[Capture, Writer],
) -> None:
    capture, _ = stream
    capture.close()
    pairs = [os.pipe() for _ in range(8)]  # take the numbers that have become free
    capture.close()
    for read, write in pairs:
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        os.close(read)
        os.close(write)
