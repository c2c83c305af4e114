# SPDX-License-Identifier: Apache-2.0
"""The destination's half: ``python -m engine_bench.destination DIRECTORY DATA PAGES BYTES WORKERS
READY``. It reads a line of its standard input before and after what is measured."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from liveshift.criu_glue.memory.store import MemoryStore
from liveshift.runtime.wire import PageStreams, Receiver, page_port

SLACK = 64 << 20
"""The subject's memory besides: its interpreter's."""


class Nothing:
    """Takes lane 0, over which only the key comes."""

    complete = False

    def write(self, stream: str, data: memoryview) -> None:
        raise AssertionError(f"{stream} has come")


def main() -> None:
    place, data, pages, size, workers, ready = sys.argv[1:]
    page_port.threads = lambda _most: int(workers)  # type: ignore[attr-defined]
    receiver = Receiver(data, pages, Path(place) / "keys", "h1", ["127.0.0.1"])
    receiver.start()
    store = MemoryStore.create(Path(place) / "store", int(size) + SLACK)
    if ready == "ready":
        store.reserve(int(size) + SLACK)
    wrote: set[int] = set()

    def write(chunk: memoryview) -> None:
        wrote.add(threading.get_ident())
        store.write(chunk)

    receiver.expect("m1", "h0", Nothing(), 0, PageStreams(write), 32)
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    print("begin", flush=True)
    sys.stdin.readline()
    said = {
        "cpu_s": time.process_time() - before,
        "bytes": receiver.received("m1"),
        "threads": len(wrote),
    }
    print(json.dumps(said), flush=True)
    sys.stdout.close()
    os._exit(0)  # the store's memory goes with its file, which the other program removes


main()
