# SPDX-License-Identifier: Apache-2.0
"""A client's connections to the helper, each for one request and its reply at a time. If no helper
listens, one is started: one for each directory, even if several agents come at once."""

from __future__ import annotations

import fcntl
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Raw

from ...errors import LiveshiftError, NotPermitted, Unreachable, from_wire
from .calls import LOCK, LOG, PROTOCOL, SOCKET, HelloHelper, HelperReply, HelperRequest, Welcome
from .channel import Channel, connect
from .starting import launch

QUESTION_S = 60.0
"""A client waits at most this many seconds for an answer: NVML may need its whole deadline, and
other clients may come first."""

IDLE_S = 60.0
"""A helper ends when it had no connection for this many seconds, and holds nothing."""

_decoder = msgspec.msgpack.Decoder(HelperReply)


class HelperConnection:
    """A connection to the helper, for one thread at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.usable = True
        """Whether the answers to all requests on this connection have come."""

    def ask(self, request: HelperRequest, returns: Any, within_s: float = QUESTION_S) -> Any:
        """Send a request; returns the answer, decoded as ``returns``. Raises what the helper
        raised, TimeoutError after ``within_s`` seconds, EOFError and OSError if the helper has
        gone."""
        self.usable = False
        self.channel.socket.settimeout(within_s)
        self.channel.send(msgspec.msgpack.encode(request))
        raw = self.channel.receive()
        self.usable = True
        reply = _decoder.decode(raw)
        if isinstance(reply.error, tuple):
            raise from_wire(*reply.error)
        assert isinstance(reply.ok, Raw)
        return msgspec.msgpack.decode(reply.ok, type=returns)


class Closing(ABC):
    """Base of context managers that call :meth:`close` on exit."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def contact(during: str) -> Iterator[None]:
    """Raises Unreachable for an error of the connection while the with block runs."""
    try:
        yield
    except (OSError, EOFError) as error:
        said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise Unreachable(
            f"the GPU helper was lost during {during}: {said}",
            hint=f"Its log is {LOG} in the agent's run directory.",
        ) from error


class HelperConnections(Closing):
    """The connections of one client to its host's helper. Any thread may use it."""

    def __init__(self, directory: Path, libraries: Path | None, idle_s: float = IDLE_S) -> None:
        self._directory, self._libraries, self._idle_s = directory, libraries, idle_s
        self._mutex = threading.Lock()
        self._idle: list[HelperConnection] = []
        self._closed = False

    def close(self) -> None:
        """Close the client's connections. The helper stays for a while."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.channel.close()

    @contextmanager
    def connection(self) -> Iterator[HelperConnection]:
        """A connection while the context lasts: an idle one or a new one. Its errors are raised as
        Unreachable. A connection whose answer has not come is closed."""
        connection = self._take()
        try:
            yield connection
        except (EOFError, OSError) as error:
            connection.usable = False
            raise self._unreachable(error) from error
        finally:
            with self._mutex:
                keep = connection.usable and not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.channel.close()

    @contextmanager
    def apart(self) -> Iterator[HelperConnection]:
        """A connection that the caller keeps and must close; this closes it only on an error."""
        connection = self._take()
        connection.channel.socket.settimeout(None)
        try:
            yield connection
        except BaseException as error:
            connection.channel.close()
            if isinstance(error, EOFError | OSError):
                raise self._unreachable(error) from error
            raise

    def _take(self) -> HelperConnection:
        while True:
            with self._mutex:
                if self._closed:
                    raise Unreachable("this client of the GPU helper has been closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            if not connection.channel.peer_gone():
                return connection
            connection.channel.close()

    def _connect(self) -> HelperConnection:
        connection = self._greeted()
        if connection is not None:
            return connection
        try:
            with open(self._directory / LOCK, "a") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                # While we waited for the lock file, another client may have started a helper.
                connection = self._greeted()
                if connection is None:
                    launch(self._directory, self._libraries, self._idle_s)
                    connection = self._greeted()
        except OSError as error:
            raise Unreachable(
                f"no GPU helper can be started in {self._directory}: {error}"
            ) from error
        if connection is None:
            raise Unreachable(f"the GPU helper in {self._directory} ended right after its start")
        return connection

    def _greeted(self) -> HelperConnection | None:
        """A connection to a helper that speaks our protocol; None if no helper listens."""
        try:
            channel = Channel(connect(self._directory, SOCKET))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except PermissionError as error:
            raise NotPermitted(
                f"the GPU helper in {self._directory} is for root only", hint="run this as root"
            ) from error
        except OSError as error:
            raise self._unreachable(error) from error
        connection = HelperConnection(channel)
        try:
            welcome = connection.ask(HelloHelper(), Welcome)
        except (EOFError, ConnectionError):
            channel.close()  # it was leaving
            return None
        except OSError as error:
            channel.close()
            raise self._unreachable(error) from error
        if welcome.protocol != PROTOCOL:
            channel.close()
            raise Unreachable(
                f"the GPU helper {welcome.pid} speaks protocol {welcome.protocol}, this is"
                f" {PROTOCOL}: another version of liveshift has started it",
                hint=f"kill {welcome.pid} (SIGTERM): it ends when it holds nothing more, and the"
                " next one is started",
            )
        return connection

    def _unreachable(self, error: BaseException) -> LiveshiftError:
        said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        return Unreachable(
            f"the GPU helper in {self._directory} does not answer: {said}",
            hint=f"its log is {self._directory / LOG}",
        )
