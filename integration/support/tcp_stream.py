# SPDX-License-Identifier: Apache-2.0
"""Two processes that stream bytes to each other over one TCP connection, both at the same time.

Each block of a stream follows from its sender and its number, so the reader checks every byte that
comes. A process sends as fast as the connection takes it, and reads at a slower pace. So there are
always bytes in the queues of both sockets and on their way. A process that has read all blocks must
read the end of the stream next.

``rank<R>.jsonl`` has a line for each block that was read, ``final<R>.json`` the digests of both
streams. The pace ends when ``OUT/hurry`` is there.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import socket
import struct
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

BLOCK = 1 << 16  # bytes
PORT = 7171
SIOCOUTQ = termios.TIOCOUTQ  # bytes that the peer's kernel has not acknowledged
SIOCINQ = termios.FIONREAD  # bytes that came and were not read


def block(sender: int, number: int) -> bytes:
    return hashlib.shake_128(f"{sender} {number}".encode()).digest(BLOCK)


def stream_digest(sender: int, blocks: int) -> str:
    """SHA-256 of the whole stream of a sender."""
    found = hashlib.sha256()
    for number in range(blocks):
        found.update(block(sender, number))
    return found.hexdigest()


def connected(rank: int) -> socket.socket:
    if rank == 0:
        with socket.create_server(("", PORT)) as server:
            return server.accept()[0]
    while True:
        with suppress(OSError):
            return socket.create_connection((os.environ["MASTER_ADDR"], PORT))
        time.sleep(0.05)


def queued(peer: socket.socket, which: int) -> int:
    (size,) = struct.unpack("i", fcntl.ioctl(peer, which, bytes(4)))
    return int(size)


class Sender:
    """Sends all blocks. ``sent``: bytes that the kernel has taken."""

    def __init__(self, rank: int, peer: socket.socket) -> None:
        self._rank = rank
        self._peer = peer
        self._digest = hashlib.sha256()
        self.sent = 0

    def run(self, blocks: int) -> str:
        for number in range(blocks):
            left = memoryview(block(self._rank, number))
            self._digest.update(left)
            while left:
                taken = self._peer.send(left)
                self.sent += taken
                left = left[taken:]
        self._peer.shutdown(socket.SHUT_WR)
        return self._digest.hexdigest()


class Reader:
    """Reads all blocks. ``read``: bytes that have come, and were as they must be."""

    def __init__(self, sender: int, peer: socket.socket) -> None:
        self._sender = sender
        self._peer = peer
        self._digest = hashlib.sha256()
        self.read = 0

    def block(self, number: int) -> None:
        expected, at = block(self._sender, number), 0
        while at < BLOCK:
            part = self._peer.recv(BLOCK - at)
            if part != expected[at : at + len(part)] or not part:
                raise SystemExit(f"after byte {self.read} came {part[:40]!r}")
            self._digest.update(part)
            at += len(part)
            self.read += len(part)

    def end(self) -> str:
        if more := self._peer.recv(1):
            raise SystemExit(f"{more!r} came after the end")
        return self._digest.hexdigest()


def used_gloo() -> None:
    """Make collectives once. With TORCH_GLOO_LAZY_INIT nothing counts them, so the job has no
    boundary from then on."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.tensor(1)
    dist.all_reduce(ranks)
    assert ranks.item() == dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds to read a block in")
    parser.add_argument("--gloo", action="store_true", help="make collectives first")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    if args.gloo:
        used_gloo()
    peer = connected(rank)
    sender, reader = Sender(rank, peer), Reader(1 - rank, peer)
    hurry = args.out / "hurry"
    with ThreadPoolExecutor(1) as pool, (args.out / f"rank{rank}.jsonl").open("w", 1) as log:
        sending = pool.submit(sender.run, args.blocks)
        for number in range(args.blocks):
            began = time.monotonic()
            reader.block(number)
            line = {"block": number, "time": time.time(), "read": reader.read, "sent": sender.sent}
            queues = {"unread": queued(peer, SIOCINQ), "unsent": queued(peer, SIOCOUTQ)}
            log.write(json.dumps(line | queues) + "\n")
            if not hurry.exists():
                time.sleep(max(0.0, began + args.pace - time.monotonic()))
        came, went = reader.end(), sending.result()
    final = {"read": reader.read, "sent": sender.sent, "sha256": came, "sha256 sent": went}
    (args.out / f"final{rank}.json").write_text(json.dumps(final) + "\n")
    print(f"rank {rank} ends", flush=True)
    if args.gloo:
        os._exit(0)  # jobs/steplog.py, leave(): torch's teardown hangs at times


if __name__ == "__main__":
    main()
