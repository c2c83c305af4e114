# SPDX-License-Identifier: Apache-2.0
"""Device memory on the wire: from the source's GPU helper into the destination's. Host memory never
holds all of it.

Stream ``devices`` carries the table of saved state (device_state.Saved). The bytes of a process's
blocks go over all lanes at once, out of order, each chunk with its place; the end of the stream
``device:<pid>`` says that all have gone. If the migration has no lanes, that stream carries them, in
the order of the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from ....cores import threads
from ....cuda_snapshot.helper.blocks import Block
from ....cuda_snapshot.helper.ring_client import Drain, Filler
from ....errors import StepFailed
from ...wire import CHUNK, Lanes
from .device_state import Saved
from .devices import DeviceTree

TABLE = "devices"
MEMORY = "device"
TABLE_LIMIT = 64 << 20
"""A table has at most this many bytes; a block takes some 60."""

SEALERS = 8
"""At most so many threads seal device memory for the lanes."""

TABLE_S = 60.0
"""Device memory that comes before the table waits at most so many seconds for it."""

Send = Callable[[str, bytes | memoryview], None]
"""A function like wire.Sender.send: empty bytes end a stream."""


class Pump:
    """Sends the table at once, and the memory in its own thread while CRIU works."""

    def __init__(self, devices: DeviceTree | None, send: Send, lanes: Lanes | None = None) -> None:
        self._lanes = lanes
        self.spread = 0
        """Bytes that have gone over the lanes."""
        self.bytes = 0 if devices is None else sum(process.bytes for process in devices.saved)
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if devices is None or not devices.saved:
            return
        send(TABLE, msgspec.msgpack.encode(devices.saved))
        send(TABLE, b"")
        self._thread = threading.Thread(target=self._run, args=(devices, send), daemon=True)
        self._thread.start()

    def finish(self) -> int:
        """Return the number of bytes once all are sent; raises the error that sending met."""
        self._join()
        if self._error is not None:
            raise self._error
        return self.bytes

    def stop(self) -> None:
        """Send nothing more. A second call does no harm."""
        self._stop.set()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, devices: DeviceTree, send: Send) -> None:
        try:
            for process in devices.saved:
                if process.blocks:
                    self._send_blocks(devices, process.pid, send)
        except BaseException as error:
            self._error = error

    def _send_blocks(self, devices: DeviceTree, pid: int, send: Send) -> None:
        stream = f"{MEMORY}:{pid}"
        drain = devices.helper.drain(devices.key(pid))
        if self._lanes is not None:
            self._spread(drain, pid, self._lanes)
        else:
            for view in drain:
                self._check()
                send(stream, view)
        send(stream, b"")

    def _spread(self, drain: Drain, pid: int, lanes: Lanes) -> None:
        """Send all bytes over the lanes. At most half of what the destination's ring takes out of
        order is under way."""
        at = under_way = 0
        with ThreadPoolExecutor(threads(SEALERS), "device memory") as pool:
            for view in drain:
                self._check()
                starts = range(0, len(view), CHUNK)
                sealed = [
                    pool.submit(lanes.device, pid, at + start, view[start : start + CHUNK])
                    for start in starts
                ]
                for one in sealed:
                    one.result()
                at += len(view)
                self.spread += len(view)
                under_way += len(view)
                if under_way > drain.reach // 2:
                    lanes.finish()
                    under_way = 0
        lanes.finish()

    def _check(self) -> None:
        if self._stop.is_set():
            raise StepFailed(
                "gpu memory", "the copy of device memory was stopped because the dump failed"
            )


class DeviceInlet:
    """Takes these streams at the destination, into memory on the GPUs of ``gpus`` (old → new).

    Every error ends the migration: StepFailed for data that no source sends, or a helper's error.
    """

    def __init__(self, devices: DeviceTree, gpus: Mapping[str, str]) -> None:
        self._devices = devices
        self._gpus = gpus
        self._raw = bytearray()
        self._fillers: dict[str, Filler] = {}
        self._saved: list[Saved] = []
        self._known = threading.Event()  # set once the table is whole, or has failed
        self._lock = threading.Lock()

    @property
    def table(self) -> bytes:
        """The source's table; a restarted agent needs it."""
        return bytes(self._raw)

    def write_table(self, data: memoryview) -> None:
        if len(self._raw) + len(data) > TABLE_LIMIT:
            raise StepFailed("ship", f"the table of devices has more than {TABLE_LIMIT} bytes")
        self._raw += data

    def end_table(self) -> None:
        """End the table; the helper now allocates all its memory."""
        try:
            saved = decode(self._raw)
            for process in saved:
                if process.blocks:
                    key = self._devices.key(process.pid)
                    self._devices.helper.create(key, self._moved(process))
            self._saved = saved
        finally:
            self._known.set()

    def write_at(self, pid: int, at: int, data: memoryview) -> None:
        """Take a chunk of a process's memory. Several threads may call this at once; a chunk that
        comes before the table waits for it."""
        if not self._known.wait(TABLE_S):
            raise StepFailed("ship", f"device memory of process {pid} came without its table")
        self.filler(str(pid)).write_at(at, data)

    def filler(self, pid: str) -> Filler:
        """What takes the memory of a process."""
        with self._lock:
            if pid not in self._fillers:
                process = next((p for p in self._saved if p.blocks and str(p.pid) == pid), None)
                if process is None:
                    text = f"device memory of process {pid[:20]!a} came unannounced"
                    raise StepFailed("ship", text)
                key = self._devices.key(process.pid)
                self._fillers[pid] = self._devices.helper.filler(key)
            return self._fillers[pid]

    def close(self) -> None:
        """Take nothing more. A second call does no harm."""
        with self._lock:
            for filler in self._fillers.values():
                filler.close()
            self._fillers.clear()

    def _moved(self, process: Saved) -> list[Block]:
        for block in process.blocks:
            if block.gpu not in self._gpus:
                raise StepFailed("ship", f"memory of the GPU {block.gpu} came unannounced")
        return [replace(b, gpu=self._gpus[b.gpu]) for b in process.blocks]


def decode(raw: bytes | bytearray) -> list[Saved]:
    """Decode the table of an image; raises StepFailed for anything else."""
    try:
        return msgspec.msgpack.decode(raw, type=list[Saved])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StepFailed("ship", f"the table of devices is not understood: {error}") from error
