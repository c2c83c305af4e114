# SPDX-License-Identifier: Apache-2.0
"""A job without torch: a chain of hashes, each made from the one before and its number.

``link()`` is all there is to it, so that a test can check every line of the record. On demand it
holds something for as long as it runs, of the kinds that make a move impossible or difficult.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import socket
import struct
import threading
import time
from pathlib import Path

NUMBERS = {
    "x86_64": {"io_uring": 425, "userfaultfd": 323, "perf": 298},
    "aarch64": {"io_uring": 425, "userfaultfd": 282, "perf": 241},
}[os.uname().machine]
"""System calls that libc has no function for."""


def link(before: str, number: int) -> str:
    return hashlib.sha256(f"{before}{number}".encode()).hexdigest()


def hold(what: str) -> int:
    """Open a kernel object by its bare system call; returns a descriptor, or -errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    if what == "io_uring":
        got = libc.syscall(NUMBERS[what], 8, ctypes.create_string_buffer(120))
    elif what == "userfaultfd":
        got = libc.syscall(NUMBERS[what], os.O_CLOEXEC | 1)  # UFFD_USER_MODE_ONLY
    elif what == "fanotify":
        got = libc.fanotify_init(0x200, os.O_RDONLY)  # FAN_REPORT_FID: needs no privilege
    elif what == "perf":
        attributes = bytearray(128)  # PERF_TYPE_SOFTWARE, size, PERF_COUNT_SW_CPU_CLOCK
        attributes[0:4], attributes[4:8] = (1).to_bytes(4, "little"), (128).to_bytes(4, "little")
        attributes[40] = 0x60  # not the kernel, not the hypervisor: needs no privilege
        pointer = (ctypes.c_char * 128).from_buffer(attributes)
        got = libc.syscall(NUMBERS[what], pointer, 0, -1, -1, 0)
    else:
        raise SystemExit(f"cannot hold {what}")
    return int(got) if got >= 0 else -ctypes.get_errno()


def idle_threads(number: int) -> None:
    threading.stack_size(64 << 10)
    for _ in range(number):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


def take_ids_up_to(number: int) -> None:
    """Children that end at once, until the kernel has handed out this process id."""
    pid = 0
    while pid < number:
        pid = os.fork() or os._exit(0)
        os.waitpid(pid, 0)


def take_lock(kind: str, mode: str, path: str) -> int:
    """Returns the descriptor by which it is held."""
    held = os.open(path, os.O_RDWR | os.O_CREAT if mode == "ex" else os.O_RDONLY)
    if kind == "flock":
        fcntl.flock(held, (fcntl.LOCK_EX if mode == "ex" else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    elif kind == "lease":
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK if mode == "ex" else fcntl.F_RDLCK)
    else:
        how = {"posix": fcntl.F_SETLK, "ofd": 37}[kind]  # F_OFD_SETLK
        of = fcntl.F_WRLCK if mode == "ex" else fcntl.F_RDLCK
        fcntl.fcntl(held, how, struct.pack("hhqqi4x", of, os.SEEK_SET, 10, 20, 0))
    return held


def relock(lock: int, args: argparse.Namespace) -> None:
    while True:
        time.sleep(args.lock_for)
        os.close(lock)
        time.sleep(0.2)
        lock = take_lock(*args.lock)


class Conversation:
    """One TCP connection to counting_server.py; each answer is checked."""

    def __init__(self, where: str) -> None:
        address, port = where.split(":")
        self.peer = socket.create_connection((address, int(port)))
        self.said = 0

    def go_on(self) -> None:
        block = hashlib.sha256(str(self.said).encode()).digest() * (1 + self.said % 400)
        self.peer.sendall(struct.pack("!QI", self.said, len(block)) + block)
        answer = self.peer.recv(44, socket.MSG_WAITALL)
        assert answer == struct.pack("!QI", self.said, 32) + hashlib.sha256(block).digest()
        self.said += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--enough", type=Path, required=True, help="end when this file is there")
    parser.add_argument("--hold", help="io_uring, userfaultfd, fanotify or perf")
    parser.add_argument("--map", type=Path, help="map this file")
    parser.add_argument("--open", type=Path, help="keep this file open, and write to it")
    parser.add_argument("--follow", type=Path, help="keep this file open, and read what comes")
    parser.add_argument("--lock", nargs=3, help="KIND (flock, posix, ofd, lease), ex or sh, FILE")
    parser.add_argument("--lock-for", type=float, help="seconds, again and again")
    parser.add_argument("--talk", help="ADDRESS:PORT of counting_server.py, a block a step")
    parser.add_argument("--mappings", type=int, default=0, help="of shared memory, each its own")
    parser.add_argument("--threads", type=int, nargs="+", default=[], help="in each process")
    parser.add_argument("--ids-from", type=int, default=0, help="threads' ids lie above this one")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    take_ids_up_to(args.ids_from)
    for number in args.threads[1:]:
        if not os.fork():
            idle_threads(number)
            while not args.enough.exists():
                time.sleep(0.1)
            os._exit(0)
    idle_threads(sum(args.threads[:1]))
    held = hold(args.hold) if args.hold else 0
    mapped = written = None
    if args.map:
        with args.map.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        whole = hashlib.sha256(mapped).hexdigest()
    if args.open:
        written = args.open.open("a", buffering=1)
    lock = take_lock(*args.lock) if args.lock else None
    if lock is not None and args.lock_for:
        threading.Thread(target=relock, args=(lock, args), daemon=True).start()
    followed, read = args.follow.open("rb+") if args.follow else None, 0
    shared = [mmap.mmap(-1, 8192) for _ in range(args.mappings)]
    for at, mapping in enumerate(shared):
        mapping[:8] = at.to_bytes(8, "little")
    talk = Conversation(args.talk) if args.talk else None
    number, value = 0, ""
    with (args.out / "rank0.jsonl").open("w", buffering=1) as log:
        while not args.enough.exists():
            number, value = number + 1, link(value, number + 1)
            if mapped:
                assert hashlib.sha256(mapped).hexdigest() == whole
            for at in range(number % 100, len(shared), 100):
                assert int.from_bytes(shared[at][:8], "little") == at
            if written:
                written.write(f"{number}\n")
            read += len(followed.read()) if followed else 0
            if talk:
                talk.go_on()
            line = {"step": number, "value": value, "time": time.time(), "held": held, "read": read}
            log.write(json.dumps(line) + "\n")
            time.sleep(args.pace)
    for _ in args.threads[1:]:
        assert os.wait()[1] == 0
    (args.out / "final0.json").write_text(json.dumps({"steps": number, "sha256": value}) + "\n")


if __name__ == "__main__":
    main()
