# SPDX-License-Identifier: Apache-2.0
"""Reads CRIU's image stream at the source, where no image file ever exists.

With ``--stream`` CRIU connects to ``<images>/streamer-capture.sock``. For every image file it
sends a length-prefixed protobuf ``{1: filename}`` and then the read end of a pipe by SCM_RIGHTS
with one byte of data (criu: img-streamer.c, images/img-streamer.proto). Several pipes are open
at a time, and pages are spliced into theirs without a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import StepFailed
from ...waiting import readable
from ..images.protobuf import ProtobufMessage

Sink = Callable[[str, bytes], None]
"""Called as sink(image name, bytes); empty bytes end that image. It may block, which slows CRIU
down to the speed of the sink."""

CHUNK = 1 << 20
F_SETPIPE_SZ = 1031
DEFAULT_PIPE = 64 << 10
NAME_LIMIT = 4096
"""An announcement that CRIU sends for an image has at most this many bytes."""

STALL_S = 30
"""A read of the rest of an announcement fails after this many seconds."""


class Capture:
    """Reads one image stream in its own thread and hands it to a sink. ``sink`` may be set later,
    as long as CRIU has not begun to dump."""

    def __init__(self, images: Path, sink: Sink | None = None) -> None:
        self.bytes = 0
        self.error: BaseException | None = None
        self.sink = sink
        self._names: dict[int, str] = {}
        self._connection: socket.socket | None = None
        self._idle = threading.Condition()
        self._closed = False
        self._failed = False
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = images / "streamer-capture.sock"
        path.unlink(missing_ok=True)
        self._server.bind(str(path))
        self._server.listen(1)
        self._wake_r, self._wake_w = os.pipe()
        self._thread = threading.Thread(target=self._run, name="criu-capture", daemon=True)
        self._thread.start()

    def wait_idle(self, timeout: float) -> None:
        """Return when every image that CRIU has opened so far has ended and reached the sink.

        An image whose announcement still waits on the connection counts as open. Raises
        TimeoutError after ``timeout`` seconds, or the error that ended the stream.
        """
        until = time.monotonic() + timeout
        with self._idle:
            while not self.error and (self._names or self._announced()):
                if time.monotonic() > until:
                    names = ", ".join(sorted(self._names.values()))
                    raise TimeoutError(f"CRIU did not end the images {names or 'it announced'}")
                self._idle.wait(0.002)
        if self.error:
            raise self.error

    def _announced(self) -> bool:
        if self._connection is None or self._failed:
            return True
        return bool(readable(0, self._connection))

    def close(self) -> None:
        """Stop reading; may be called again. If CRIU still writes, it gets EPIPE and lets the
        tree go."""
        if self._closed:  # other files may have these descriptor numbers by now
            return
        self._closed = True
        os.write(self._wake_w, b"x")
        self._thread.join()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        error: BaseException | None = None
        try:
            selector.register(self._wake_r, selectors.EVENT_READ)
            selector.register(self._server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._server:
                        self._connection, _ = self._server.accept()
                        self._connection.setsockopt(
                            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", STALL_S, 0)
                        )
                        selector.unregister(self._server)
                        selector.register(self._connection, selectors.EVENT_READ)
                    elif self._connection is not None and key.fileobj is self._connection:
                        if not self._open_image(self._connection, selector):
                            selector.unregister(self._connection)
                    elif key.fd == self._wake_r:
                        return
                    else:
                        self._read(key.fd, selector)
        except BaseException as caught:
            error = caught
        finally:
            selector.close()
            for fd in self._names:
                os.close(fd)
            for sock in (self._connection, self._server):
                if sock is not None:
                    sock.close()
            with self._idle:  # last, so that CRIU's pipes are closed when a waiter sees the error
                self.error = error
                self._idle.notify_all()

    def _open_image(self, connection: socket.socket, selector: selectors.BaseSelector) -> bool:
        with self._idle:  # so that wait_idle sees the image as announced or as open, never neither
            try:
                return self._take_announcement(connection, selector)
            except BaseException:
                self._failed = True  # until ``error`` is set, wait_idle must not see an idle stream
                raise

    def _take_announcement(
        self, connection: socket.socket, selector: selectors.BaseSelector
    ) -> bool:
        head = connection.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return False
        size = announced_size(head)
        name = announced_name(connection.recv(size, socket.MSG_WAITALL))
        fd = _descriptor(connection)
        self._names[fd] = name
        selector.register(fd, selectors.EVENT_READ)
        return True

    def _read(self, fd: int, selector: selectors.BaseSelector) -> None:
        data = os.read(fd, CHUNK)
        if len(data) == DEFAULT_PIPE:
            with contextlib.suppress(OSError):  # fewer wake-ups for what follows
                fcntl.fcntl(fd, F_SETPIPE_SZ, CHUNK)
        self.bytes += len(data)
        assert self.sink is not None
        self.sink(self._names[fd], data)
        if not data:
            selector.unregister(fd)
            os.close(fd)
            with self._idle:
                del self._names[fd]
                self._idle.notify_all()


def announced_size(head: bytes) -> int:
    """The size in bytes of the message that follows; raises StepFailed above NAME_LIMIT."""
    size: int = struct.unpack("<I", head)[0]
    if not 0 < size <= NAME_LIMIT:
        raise StepFailed(
            "dump", f"CRIU announces an image in {size} bytes; at most {NAME_LIMIT} are allowed"
        )
    return size


def announced_name(message: bytes) -> str:
    """The image's name in an announcement; raises StepFailed for anything else."""
    try:
        raw = ProtobufMessage(message).raw(1)
        return bytes(raw or b"").decode("ascii")
    except ValueError as error:
        raise StepFailed(
            "dump", f"CRIU sent an unknown message on its image stream: {message[:16]!r}"
        ) from error


def _descriptor(connection: socket.socket) -> int:
    """The pipe that CRIU sends with one byte; raises StepFailed if CRIU sends no pipe."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors or not stat.S_ISFIFO(os.fstat(descriptors[0]).st_mode):
        for fd in descriptors:
            os.close(fd)
        raise StepFailed("dump", "CRIU announced an image but sent no pipe for it")
    return descriptors[0]
