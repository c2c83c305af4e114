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
from typing import Any

from liveshift.criu_glue.memory.store.store import MemoryStore
from liveshift.runtime.agent.arrival.inbox import Inbox
from liveshift.runtime.wire import Receiver, page_port

SLACK = 64 << 20
"""The subject's memory besides: its interpreter's."""


class Store(MemoryStore):
    """One that notes which threads write to it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wrote: set[int] = set()

    def write(self, chunk: bytes | memoryview) -> None:
        self.wrote.add(threading.get_ident())
        super().write(chunk)


def main() -> None:
    place, data, pages, size, workers, ready = sys.argv[1:]
    page_port.threads = lambda most: int(workers)  # type: ignore[attr-defined]  # imported there
    receiver = Receiver(data, pages, Path(place) / "keys", "h1", ["127.0.0.1"], clear=True)
    receiver.start()
    images, limit = Path(place) / "store", int(size) + SLACK
    store = Store(images, limit, fresh=True)
    if ready == "ready":
        store.reserve(limit)
    nowhere: Any = None  # over lane 0 only the key comes
    inbox = Inbox(nowhere, None, limit, None, memory=store)
    receiver.expect("m1", "h0", inbox, 0, inbox.pages, 32)
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    print("begin", flush=True)
    sys.stdin.readline()
    said = {
        "cpu_s": time.process_time() - before,
        "bytes": receiver.received("m1"),
        "threads": len(store.wrote),
    }
    print(json.dumps(said), flush=True)
    sys.stdout.close()
    os._exit(0)  # the store's memory goes with its file, which the other program removes


main()
