# SPDX-License-Identifier: Apache-2.0
"""A bare copy over several TCP streams at once: no hash, no encryption, no protocol to speak of.

    streams.py serve ADDRESS PORT             takes copies until its input ends
    streams.py fill ADDRESS PORT N SECONDS    sends memory, over and over
    streams.py files ADDRESS PORT N DIR TO    sends the files of DIR, which the server writes to TO

The last two wait for a line of input, so that starting them is not measured; then the server prints
for each connection the bytes, and when (monotonic clock) the first and the last of them came.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CHUNK = 1 << 20
WARM = 64 << 20
"""Bytes in which a filled stream lands: more than the cache has, touched before."""
PART = 64 << 20
"""Of a large file, for one stream."""


def serve(address: str, port: int) -> None:
    listening = socket.create_server((address, port), backlog=64)
    print("listening", flush=True)

    def accept() -> None:
        while True:
            peer, _ = listening.accept()
            threading.Thread(target=take, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


def take(peer: socket.socket) -> None:
    """One connection: parts, each with a line about it before."""
    reader = peer.makefile("rb", buffering=0)
    buffer = memoryview(bytearray(b"\1") * WARM)
    count, first = 0, 0.0
    peer.sendall(b".")  # it is ready
    while line := reader.readline():
        first = first or time.monotonic()
        part = json.loads(line)
        if part["to"] is None:
            at = 0
            while got := peer.recv_into(buffer[at : at + CHUNK]):
                count += got
                at = (at + CHUNK) % WARM
            break
        fd = os.open(part["to"], os.O_WRONLY | os.O_CREAT, 0o600)
        left, at = part["size"], part["at"]
        while left:
            got = peer.recv_into(buffer[: min(CHUNK, left)])
            if not got:
                raise EOFError(part["to"])
            os.pwrite(fd, buffer[:got], at)
            left, at, count = left - got, at + got, count + got
        os.close(fd)
        peer.sendall(b".")
    seen = {"bytes": count, "first": first, "last": time.monotonic()}
    os.write(1, json.dumps(seen).encode() + b"\n")  # a line in one piece, for there are others


def connections(address: str, port: int, count: int) -> list[socket.socket]:
    found = [socket.create_connection((address, port)) for _ in range(count)]
    for each in found:
        assert each.recv(1) == b"."
    return found


def fill(peers: list[socket.socket], seconds: float) -> None:
    def send(peer: socket.socket) -> None:
        buffer = memoryview(bytearray(b"\1") * WARM)
        peer.sendall(json.dumps({"to": None}).encode() + b"\n")
        until, at = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            peer.sendall(buffer[at : at + CHUNK])
            at = (at + CHUNK) % WARM
        peer.shutdown(socket.SHUT_WR)

    each_in_a_thread(send, peers)


def files(peers: list[socket.socket], source: Path, to: Path) -> None:
    left = parts(source)
    lock = threading.Lock()

    def send(peer: socket.socket) -> None:
        while True:
            with lock:
                if (part := next(left, None)) is None:
                    break
            path, at, size = part
            line = {"to": str(to / path.name), "at": at, "size": size}
            peer.sendall(json.dumps(line).encode() + b"\n")
            with path.open("rb") as file:
                sent = 0
                while sent < size:
                    sent += os.sendfile(peer.fileno(), file.fileno(), at + sent, size - sent)
            assert peer.recv(1) == b"."  # all of it is there
        peer.shutdown(socket.SHUT_WR)

    each_in_a_thread(send, peers)


def parts(source: Path) -> Iterator[tuple[Path, int, int]]:
    """Files in parts, the largest first."""
    for path in sorted(source.iterdir(), key=lambda path: -path.stat().st_size):
        size = path.stat().st_size
        for at in range(0, size or 1, PART):
            yield path, at, min(PART, size - at)


def each_in_a_thread(do: Callable[[socket.socket], None], peers: list[socket.socket]) -> None:
    threads = [threading.Thread(target=do, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    what, address, port, *rest = sys.argv[1:]
    if what == "serve":
        serve(address, int(port))
        return
    peers = connections(address, int(port), int(rest[0]))
    print("connected", flush=True)
    sys.stdin.readline()
    if what == "fill":
        fill(peers, float(rest[1]))
    else:
        files(peers, Path(rest[1]), Path(rest[2]))
    print("sent", flush=True)


if __name__ == "__main__":
    main()
