# SPDX-License-Identifier: Apache-2.0
"""The helper's server: one thread for each connection, which answers one request after the
other."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ...errors import LiveshiftError, Unreachable
from .calls import (
    LOCK,
    PROTOCOL,
    SOCKET,
    Change,
    HelloHelper,
    HelperReply,
    Request,
    ServiceRequest,
    Welcome,
    done,
    failed,
)
from .channel import Channel, listen, peer_of
from .process_session import ProcessSession

log = logging.getLogger("liveshift.gpu")

HELLO_S = 30.0
"""A client must send its first request, and receive an answer, within this many seconds."""

_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


class Caller:
    """A client's connection, as the service sees it."""

    def __init__(self, channel: Channel, until_closed: ExitStack) -> None:
        self.channel, self.until_closed = channel, until_closed
        self.session: ProcessSession | None = None
        """The device session that the client has begun, if any."""


class Server:
    """Serves until it had no connection for ``idle_s`` seconds, or until SIGTERM comes.
    In every case it stays while ``why_stay`` returns a reason in words, and until operations have
    ended. ``answer`` returns the answer to a request."""

    def __init__(
        self,
        directory: Path,
        answer: Callable[[Caller, ServiceRequest], object],
        why_stay: Callable[[], str],
        idle_s: float,
    ) -> None:
        """Listens from now on. Raises OSError."""
        self._directory = directory
        self._answer, self._why_stay, self._idle_s = answer, why_stay, idle_s
        self._mutex = threading.Lock()
        self._connections = 0
        self._under_way = 0
        self._idle_since = time.monotonic()
        self._told_to_leave = False
        self._gone = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listener = listen(directory, SOCKET)
        self._listener.setblocking(False)

    def serve(self) -> None:
        """Serve in the main thread. Returns when the helper must end; then other threads do nothing
        but wait for their clients."""
        signal.signal(signal.SIGTERM, lambda *_: self._go())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        while not self._time_to_go():
            wait_s = self._idle_s / 2 if not self._told_to_leave else 1.0
            poll.poll(max(50.0, wait_s * 1000))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self._accept()
        log.info("leaving")

    def _accept(self) -> bool:
        """Accept all connections that wait; returns whether there were any."""
        some = False
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return some
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    log.error("a connection cannot be accepted: %s", error)
                    return some
                continue  # it has hung up already
            some = True
            with self._mutex:
                self._connections += 1
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _time_to_go(self) -> bool:
        """Whether the helper may end now; if so, it takes no more connections. A client that starts
        a helper holds the lock file until the helper answers. So this ends only with the lock: then
        no client has just learnt that this helper exists."""
        with self._mutex:
            idle = not self._connections and time.monotonic() - self._idle_since >= self._idle_s
            if self._under_way or not (idle or self._told_to_leave):
                return False
        why = self._why_stay()
        if why:
            if self._told_to_leave:
                log.warning("asked to end, but the helper must stay: %s", why)
            self._told_to_leave = False
            return False
        with open(self._directory / LOCK, "a") as turn:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self._accept() and not self._told_to_leave:
                return False
            with self._mutex:
                self._gone = not self._under_way  # from now on changes are refused
            if not self._gone:
                return False
            (self._directory / SOCKET).unlink(missing_ok=True)
            self._listener.close()
        return True

    def _go(self) -> None:
        self._told_to_leave = True
        os.eventfd_write(self._bell, 1)

    def _converse(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        pid, uid = peer_of(connection)
        try:
            if uid not in (0, os.geteuid()):
                log.warning("refused a connection: uid %d, process %d", uid, pid)
                return
            connection.settimeout(HELLO_S)
            with ExitStack() as until_closed:
                caller = Caller(channel, until_closed)
                while True:
                    self._serve_one(caller, channel.receive())
                    connection.settimeout(None)
        except (EOFError, OSError):
            pass  # the client has hung up, or does not take its answer
        except Exception:
            log.exception("a connection of process %d", pid)
        finally:
            channel.close()
            with self._mutex:
                self._connections -= 1
                self._idle_since = time.monotonic()
            os.eventfd_write(self._bell, 1)

    def _serve_one(self, caller: Caller, raw: bytes) -> None:
        """Serve one request. A change counts as under way until its answer is sent."""
        try:
            request = _decoder.decode(raw)
        except msgspec.DecodeError as error:
            wrong = LiveshiftError(f"the GPU helper does not understand a request: {error}")
            caller.channel.send(msgspec.msgpack.encode(failed(wrong)))
            return
        changing = isinstance(request, Change)
        with self._mutex:
            refused = self._gone and changing
            self._under_way += changing
        try:
            if refused:
                reply = failed(Unreachable("the GPU helper is leaving"))
            else:
                reply = self._reply(caller, request)
            caller.channel.socket.settimeout(HELLO_S)
            caller.channel.send(msgspec.msgpack.encode(reply))
        finally:
            with self._mutex:
                self._under_way -= changing
            if changing and self._told_to_leave:
                os.eventfd_write(self._bell, 1)

    def _reply(self, caller: Caller, request: Request) -> HelperReply:
        try:
            if isinstance(request, HelloHelper):
                return done(Welcome(PROTOCOL, os.getpid()))
            return done(self._answer(caller, request))
        except LiveshiftError as error:
            log.warning("%s: %s", request, error)
            return failed(error)
        except Exception as error:
            log.exception("%s", request)
            return failed(error)
