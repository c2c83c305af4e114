# SPDX-License-Identifier: Apache-2.0
"""A job without torch: a chain of hashes, each made from the one before and its number.

``link()`` is all there is to it, so that a test can check every line of the record. On demand it
holds something for as long as it runs, of the kinds that make a move impossible or difficult.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--enough", type=Path, required=True, help="end when this file is there")
    parser.add_argument("--hold", help="io_uring, userfaultfd, fanotify or perf")
    parser.add_argument("--map", type=Path, help="map this file")
    parser.add_argument("--open", type=Path, help="keep this file open, and write to it")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    held = hold(args.hold) if args.hold else 0
    mapped = written = None
    if args.map:
        with args.map.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        whole = hashlib.sha256(mapped).hexdigest()
    if args.open:
        written = args.open.open("a", buffering=1)
    number, value = 0, ""
    with (args.out / "rank0.jsonl").open("w", buffering=1) as log:
        while not args.enough.exists():
            number, value = number + 1, link(value, number + 1)
            if mapped:
                assert hashlib.sha256(mapped).hexdigest() == whole
            if written:
                written.write(f"{number}\n")
            line = {"step": number, "value": value, "time": time.time(), "held": held}
            log.write(json.dumps(line) + "\n")
            time.sleep(args.pace)
    (args.out / "final0.json").write_text(json.dumps({"steps": number, "sha256": value}) + "\n")


if __name__ == "__main__":
    main()
