# SPDX-License-Identifier: Apache-2.0
"""Device memory on the wire: from the source's GPU helper into the destination's. Host memory never
holds all of it.

Streams: ``devices`` carries the table of saved state (device_state.Saved); then ``device:<pid>``
carries the bytes of that process's blocks, in the order of the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from ....cuda_snapshot.helper.blocks import Block
from ....cuda_snapshot.helper.ring_client import Filler
from ....errors import StepFailed
from .device_state import Saved
from .devices import DeviceTree

TABLE = "devices"
MEMORY = "device"
TABLE_LIMIT = 64 << 20
"""A table has at most this many bytes; a block takes some 60."""

Send = Callable[[str, bytes | memoryview], None]
"""A function like wire.Sender.send: empty bytes end a stream."""


class Pump:
    """Sends the table at once, and the memory in its own thread while CRIU works."""

    def __init__(self, devices: DeviceTree | None, send: Send) -> None:
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
        for view in devices.helper.drain(devices.key(pid)):
            if self._stop.is_set():
                raise StepFailed(
                    "gpu memory", "the copy of device memory was stopped because the dump failed"
                )
            send(stream, view)
        send(stream, b"")


class DeviceInlet:
    """Takes these streams at the destination, into memory on the GPUs of ``gpus`` (old → new).

    Every error ends the migration: StepFailed for data that no source sends, or a helper's error.
    """

    def __init__(self, devices: DeviceTree, gpus: Mapping[str, str]) -> None:
        self._devices = devices
        self._gpus = gpus
        self._raw = bytearray()
        self._fillers: list[Filler] = []
        self._saved: list[Saved] = []

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
        self._saved = decode(self._raw)
        for process in self._saved:
            if process.blocks:
                key = self._devices.key(process.pid)
                self._devices.helper.create(key, self._moved(process))

    def filler(self, pid: str) -> Filler:
        """What takes the memory of a process."""
        process = next((p for p in self._saved if p.blocks and str(p.pid) == pid), None)
        if process is None:
            raise StepFailed("ship", f"device memory of process {pid[:20]!a} came unannounced")
        self._fillers.append(self._devices.helper.filler(self._devices.key(process.pid)))
        return self._fillers[-1]

    def close(self) -> None:
        """Take nothing more. A second call does no harm."""
        for filler in self._fillers:
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
