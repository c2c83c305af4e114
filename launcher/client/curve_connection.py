# SPDX-License-Identifier: Apache-2.0
"""Frames to and from the orchestrator over TCP, with an operator's key.

The other end is runtime/control/link.py. A connection that breaks is made again, and a request
without an answer is sent again: the orchestrator serves no request twice. If the orchestrator was
restarted meanwhile, the client cannot know how far the request got.
"""

from __future__ import annotations

import socket as sockets
import time
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...errors import LiveshiftError, NotFound, NotPermitted, Unreachable, from_wire
from ...runtime.config.values import ORCHESTRATOR
from ...runtime.control.connection import new_boot_id
from ...runtime.control.key_files import read_public
from ...runtime.control.keys import load_pair
from ...runtime.control.send_queue import FROM_ORCHESTRATOR, TO_ORCHESTRATOR, limit
from ...runtime.messages import Frame, Here, There, decode, encode_request
from .context import Remote

CONNECT_S = 10.0
CLOSED_S = 1.0
"""After a refused connection, the client tries again for this many seconds: the orchestrator may be
restarting."""
BROKEN_OFF = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
HANDSHAKES = 3
"""After this many handshakes that broke off, the listener is not our orchestrator. One of them may
have met a restart."""


class CurveConnection:
    """A connection to the orchestrator at ``remote``, made when first needed."""

    def __init__(self, remote: Remote) -> None:
        self.name = f"tcp://{remote.address}"  # in errors
        self.first = new_boot_id()  # the number of the first request
        self._remote = remote
        self._boot_id = new_boot_id()
        self._numbers = iter(range(self._boot_id, self._boot_id + (1 << 32)))
        self._socket: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._up = False  # both sides have shown their keys
        self._theirs: int | None = None  # the boot id of the orchestrator that we are connected to

    def close(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(0)
        if self._events is not None:
            self._events.close(0)
        self._socket = self._events = self._theirs = None
        self._up = False

    def exchange(self, number: int, frame: bytes, until: float) -> Frame:
        """Send a request and return its answer, before ``until`` (monotonic seconds).

        Raises TimeoutError; EOFError if the orchestrator was restarted meanwhile; Unreachable if
        there is none; NotPermitted if it turns the key away; LiveshiftError if the request is too
        long.
        """
        if len(frame) > TO_ORCHESTRATOR:
            raise LiveshiftError(
                f"the request has {len(frame)} bytes, above the limit of {TO_ORCHESTRATOR}"
            )
        if self._socket is None:
            self._open()
        asked: int | None = None  # the boot id of the orchestrator that got the request
        while True:
            self._catch_up()
            theirs = self._theirs or self._greeted(until)
            if theirs is None:
                continue  # the connection broke again
            if asked is not None and asked != theirs:
                raise EOFError("the orchestrator was restarted meanwhile")
            asked = theirs
            if (answer := self._answered(number, frame, until)) is not None:
                return answer

    def _open(self) -> None:
        pair = load_pair(self._remote.key)
        host, _, port = self._remote.address.rpartition(":")
        try:
            found = sockets.getaddrinfo(host, int(port), sockets.AF_INET, sockets.SOCK_STREAM)
        except OSError as error:
            raise Unreachable(f"{self.name}: there is no such host: {error}") from None
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket = socket
        socket.curve_serverkey = read_public(server_key(self._remote.key))
        socket.curve_secretkey, socket.curve_publickey = pair.secret, pair.public
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not connected
        limit(socket, longest=FROM_ORCHESTRATOR)
        self._events = socket.get_monitor_socket()
        socket.connect("tcp://{}:{}".format(*found[0][4][:2]))

    # ---- connecting ----

    def _greeted(self, until: float) -> int | None:
        """Wait for a connection and ask for the orchestrator's boot id; None if it broke
        meanwhile."""
        self._connected(until)
        number = next(self._numbers)
        answer = self._answered(number, encode_request(number, Here(self._boot_id)), until)
        if answer is not None and answer.error is not None:
            raise from_wire(*answer.error)
        if answer is not None and isinstance(answer.answer, There):
            self._theirs = answer.answer.boot_id
        return self._theirs

    def _connected(self, until: float) -> None:
        """Wait until the orchestrator has shown its key and taken ours. Raises TimeoutError, or
        Unreachable with the cause."""
        begun = time.monotonic()
        closed, broken = False, 0
        while not self._up:
            if (event := self._event(min(until, begun + CONNECT_S))) is None:
                if not closed and time.monotonic() >= until:
                    raise TimeoutError
                break
            if event == zmq.EVENT_CLOSED:
                closed = True
                if time.monotonic() > begun + CLOSED_S:
                    break
            broken += event in BROKEN_OFF
            if broken >= HANDSHAKES:
                raise Unreachable(
                    f"what listens at {self.name} is not the orchestrator whose key is in"
                    f" {server_key(self._remote.key)}",
                    hint="a wrong address, or the orchestrator has a new key: copy its"
                    " public/orchestrator.pub again",
                )
        else:
            return
        cause, look = _why_not(self._remote.address)
        raise Unreachable(f"no orchestrator at {self.name}: {cause}", hint=look)

    def _event(self, until: float) -> int | None:
        """Return the next event of the connection, None if there is none by ``until``. Raises
        NotPermitted if our key was turned away."""
        assert self._events is not None
        left = max(0.0, until - time.monotonic())
        if not self._events.poll(int(left * 1000) + 1):
            return None
        event = int(recv_monitor_message(self._events)["event"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._up = True
        elif event == zmq.EVENT_DISCONNECTED:
            self._up, self._theirs = False, None
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise NotPermitted(
                f"{self.name} turned the key in {self._remote.key} away",
                hint="it was revoked, or is not one of this cluster: `liveshift keys list` where"
                " its keys are made",
            )
        return event

    def _catch_up(self) -> None:
        """Handle what happened to the connection since the last exchange."""
        while self._event(0.0) is not None:
            pass

    # ---- talking ----

    def _answered(self, number: int, frame: bytes, until: float) -> Frame | None:
        """Send and wait for the answer; None if the connection broke. Raises TimeoutError."""
        assert self._socket is not None
        assert self._events is not None
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:  # the connection broke a moment ago
            self._up, self._theirs = False, None
            return None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if self._socket in ready:
                answer = decode(self._socket.recv())
                # Another number: the second answer to a request that was sent twice. 0: the answer
                # to a frame that was not understood.
                if answer.id in (number, 0):
                    return answer
            elif self._events in ready:
                self._event(0.0)
                if not self._up:
                    return None
        raise TimeoutError


def _why_not(address: str) -> tuple[str, str]:
    """Return (cause, what to look at) for a handshake that did not take place."""
    import asyncio

    from ...runtime.control import reach

    return asyncio.run(reach.why_closed(address)) or (
        f"no answer within {CONNECT_S:g} s",
        "its address is cluster.orchestrator in the cluster file; `systemctl status"
        " liveshift-orchestrator` there",
    )


def server_key(key: Path) -> Path:
    """Return where the orchestrator's public key lies for an operator's key: next to it, or where
    `liveshift keys` made both. Raises NotFound."""
    name = f"{ORCHESTRATOR}.pub"
    places = (key.parent / name, key.parent.parent / "public" / name)
    for place in places:
        if place.exists():
            return place
    raise NotFound(
        f"{places[0]}: the orchestrator's public key is not next to {key.name}",
        hint=f"copy public/{name} there from where the keys were made",
    )
