# SPDX-License-Identifier: Apache-2.0
"""Device memory on the wire: from the source's GPU helper into the destination's. Host memory never
holds all of it.

Stream ``devices`` on lane 0 carries the table of saved state (device_state.SavedDevices). The
destination allocates all the memory, then acknowledges the table. Then the source sends the blocks,
one process after the other. The bytes go over all lanes for memory at once, and may overtake each
other: each chunk says whose it is and where it belongs. When the destination has acknowledged all
chunks of a process, the source ends the stream ``device:<pid>`` on lane 0. At this end the
destination refuses the image unless each byte has come once.

A full dump has no other lanes. Then the stream ``device:<pid>`` carries the bytes, in the order of
the table.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NoReturn

import msgspec

from ....cores import threads
from ....cuda_snapshot.helper.blocks import Block
from ....cuda_snapshot.helper.ring_client import Drain, Filler
from ....errors import StepFailed
from ...wire import CHUNK, Lanes, Sender
from .device_state import SavedDevices
from .devices import DeviceTree

TABLE = "devices"
MEMORY = "device"
TABLE_LIMIT = 64 << 20
"""A table has at most this many bytes; a block takes some 60."""

SEALERS = 8
"""At most this many threads seal device memory for the lanes."""


class Pump:
    """Sends the table at once, and the memory in its own thread while CRIU works. ``lanes``: None
    to send all on lane 0."""

    def __init__(self, devices: DeviceTree | None, sender: Sender, lanes: Lanes | None) -> None:
        self.bytes = 0 if devices is None else sum(process.bytes for process in devices.saved)
        self._sender, self._lanes = sender, lanes
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if devices is None or not devices.saved:
            return
        sender.send(TABLE, msgspec.msgpack.encode(devices.saved))
        sender.send(TABLE, b"")
        self._thread = threading.Thread(target=self._run, args=(devices,), daemon=True)
        self._thread.start()

    def finish(self) -> int:
        """Return the number of bytes once all are sent; raises the error that sending met."""
        self._join()
        if self._error is not None:
            raise self._error
        return self.bytes

    def describe(self) -> str:
        """Return which way the memory went, as the table of phases says it."""
        used = sum(1 for size in self._lanes.device_bytes if size) if self._lanes else 0
        way = f"over {used} lane{'s' if used > 1 else ''} at once" if used else "over lane 0"
        return f"what was not sent yet; all went {way}"

    def stop(self) -> None:
        """Send nothing more. A second call does no harm."""
        self._stop.set()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, devices: DeviceTree) -> None:
        try:
            for process in devices.saved:
                if process.blocks:
                    # Chunks on other lanes must not overtake the table, nor the end of the process
                    # before: until that end the destination's helper uses a ring for it.
                    self._sender.wait_taken()
                    self._send_blocks(devices, process.pid)
        except BaseException as error:
            self._error = error

    def _send_blocks(self, devices: DeviceTree, pid: int) -> None:
        stream = f"{MEMORY}:{pid}"
        with devices.helper.drain(devices.key(pid)) as drain:
            if self._lanes is not None:
                self._spread(drain, pid, self._lanes)
            else:
                for view in drain:
                    self._check()
                    self._sender.send(stream, view)
        self._sender.send(stream, b"")

    def _spread(self, drain: Drain, pid: int, lanes: Lanes) -> None:
        """Send all bytes over the lanes; return when the destination has acknowledged them.

        A chunk comes ahead of one that a slow lane still holds. The ring at the destination limits
        by how much (Filler), so this waits until the oldest bytes are acknowledged."""
        at = ahead = 0
        sent: deque[tuple[list[int], int]] = deque()  # a mark of the lanes, bytes before it
        with ThreadPoolExecutor(threads(SEALERS), "device memory") as sealers:
            for view in drain:
                self._check()
                while sent and ahead + len(view) > drain.reach:
                    mark, size = sent.popleft()
                    lanes.finish(mark)
                    ahead -= size
                chunks = [
                    sealers.submit(lanes.device, pid, at + start, view[start : start + CHUNK])
                    for start in range(0, len(view), CHUNK)
                ]
                for chunk in chunks:
                    chunk.result()
                sent.append((lanes.mark(), len(view)))
                at, ahead = at + len(view), ahead + len(view)
        lanes.finish()

    def _check(self) -> None:
        if self._stop.is_set():
            raise StepFailed(
                "gpu memory", "the copy of device memory was stopped because the dump failed"
            )


class TableInlet:
    """Takes the table of an image that a host holds for others, and needs no GPU for that. All
    device memory of such an image is in the memory of its processes: StepFailed if some comes by
    itself."""

    def __init__(self) -> None:
        self._raw = bytearray()

    @property
    def table(self) -> bytes:
        """The source's table; a restarted agent needs it."""
        return bytes(self._raw)

    def write_table(self, data: memoryview) -> None:
        if len(self._raw) + len(data) > TABLE_LIMIT:
            raise StepFailed("ship", f"the table of devices has more than {TABLE_LIMIT} bytes")
        self._raw += data

    def end_table(self) -> None:
        """End the table."""
        for process in decode(self._raw):
            if process.blocks:
                _refuse(str(process.pid))

    def write_at(self, pid: int, at: int, data: memoryview) -> None:
        """Take a chunk of a process's memory."""
        _refuse(str(pid))

    def filler(self, pid: str) -> Filler:
        """What takes the memory of a process."""
        _refuse(pid)

    def close(self) -> None:
        """Take nothing more. A second call does no harm."""


def _refuse(pid: str) -> NoReturn:
    text = f"device memory of process {pid[:20]!a} came beside an image that is held for others"
    raise StepFailed("ship", text)


class DeviceInlet(TableInlet):
    """Takes these streams at the destination, into memory on the GPUs of ``gpus`` (old → new).

    Every error ends the migration: StepFailed for data that no source sends, or a helper's error.
    """

    def __init__(self, devices: DeviceTree, gpus: Mapping[str, str]) -> None:
        super().__init__()
        self._devices = devices
        self._gpus = gpus
        self._saved: list[SavedDevices] = []
        self._fillers: dict[str, Filler] = {}
        self._closed = False
        self._lock = threading.Lock()

    def end_table(self) -> None:
        """End the table; the helper now allocates all its memory."""
        saved = decode(self._raw)
        for process in saved:
            if process.blocks:
                key = self._devices.key(process.pid)
                self._devices.helper.create(key, self._moved(process))
        self._saved = saved

    def write_at(self, pid: int, at: int, data: memoryview) -> None:
        """Take a chunk of a process's memory; several threads may call this."""
        self.filler(str(pid)).write_at(at, data)

    def filler(self, pid: str) -> Filler:
        """What takes the memory of a process."""
        with self._lock:
            if self._closed:
                raise StepFailed("ship", "the image is closed and takes no more device memory")
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
            self._closed = True
            for filler in self._fillers.values():
                filler.close()
            self._fillers.clear()

    def _moved(self, process: SavedDevices) -> list[Block]:
        for block in process.blocks:
            if block.gpu not in self._gpus:
                raise StepFailed("ship", f"memory of the GPU {block.gpu} came unannounced")
        return [replace(b, gpu=self._gpus[b.gpu]) for b in process.blocks]


def decode(raw: bytes | bytearray) -> list[SavedDevices]:
    """Decode the table of an image; raises StepFailed for anything else."""
    try:
        return msgspec.msgpack.decode(raw, type=list[SavedDevices])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StepFailed("ship", f"the table of devices is not understood: {error}") from error
