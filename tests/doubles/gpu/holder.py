# SPDX-License-Identifier: Apache-2.0
"""A process with device memory that it gives up and takes back at the word of a device session.

What the interposer's service thread does, and what it could do wrong: ``FAULTS`` is a list of
"OP:N:what", the N-th (from 1) request of that kind is answered with that CUresult, or not at all
("silent"), or by death ("die"), or by closing the session ("close"), or done without its descriptor
("bare"). Arguments: libcuda, the folder of the session's socket, sizes in MiB "SIZE@DEVICE,…".
Standard input: lines "serve" (one session) or "sum" (of all memory), answered with one line each.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import random
import socket
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from liveshift.interposer import device_session as wire
from liveshift.interposer.device_session import Op
from liveshift.interposer.layout import MemoryKind

MIB = 1 << 20
u64, size_t = ctypes.c_ulonglong, ctypes.c_size_t


@dataclass
class Held:
    address: int
    size: int
    device: int
    kind: MemoryKind
    handle: int = 0
    here: bool = True


class Failed(Exception):
    pass


Packet = bytes  # Holder has a method of that name


class Holder:
    def __init__(self, library: str, described: str) -> None:
        self.cu = ctypes.CDLL(library)
        self.call("cuInit", 0)
        self.held: list[Held] = []
        dice = random.Random(7)
        for word in described.split(","):
            size, _, device = word.partition("@")
            self.current(int(device))
            for kind in (MemoryKind.ARENA, MemoryKind.DEVICE):  # a small plain one beside each
                held = self.make(
                    int(size) * MIB if kind is MemoryKind.ARENA else 4096, device, kind
                )
                data = dice.randbytes(held.size)
                self.call("cuMemcpyHtoD_v2", u64(held.address), data, size_t(held.size))
                self.held.append(held)

    def call(self, name: str, *args: object) -> None:
        code = getattr(self.cu, name)(*args)
        if code:
            raise Failed(code)

    def current(self, device: int) -> None:
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def make(self, size: int, device: str, kind: MemoryKind) -> Held:
        at = u64()
        if kind is MemoryKind.DEVICE:
            self.call("cuMemAlloc_v2", ctypes.byref(at), size_t(size))
            return Held(at.value, size, int(device), kind)
        handle = u64()
        properties = (ctypes.c_int * 8)(1, 1, 1, int(device))
        self.call("cuMemCreate", ctypes.byref(handle), size_t(size), properties, u64(0))
        zero = u64(0)
        self.call("cuMemAddressReserve", ctypes.byref(at), size_t(size), size_t(0), zero, zero)
        held = Held(at.value, size, int(device), kind, handle.value, False)
        self.map(held, handle.value)
        return held

    def map(self, held: Held, handle: int) -> None:
        at, size = u64(held.address), size_t(held.size)
        self.call("cuMemMap", at, size, size_t(0), u64(handle), u64(0))
        access = (ctypes.c_int * 3)(1, held.device, 3)
        self.call("cuMemSetAccess", at, size, access, size_t(1))
        held.handle, held.here = handle, True

    def renew(self, held: Held) -> None:
        """Give it memory that was made here, with the same bytes."""
        data = self.bytes(held)
        self.call("cuMemUnmap", u64(held.address), size_t(held.size))
        self.call("cuMemRelease", u64(held.handle))
        handle = u64()
        properties = (ctypes.c_int * 8)(1, 1, 1, held.device)
        self.call("cuMemCreate", ctypes.byref(handle), size_t(held.size), properties, u64(0))
        self.map(held, handle.value)
        self.call("cuMemcpyHtoD_v2", u64(held.address), data, size_t(held.size))

    def bytes(self, held: Held) -> bytes:
        data = ctypes.create_string_buffer(held.size)
        self.call("cuMemcpyDtoH_v2", data, u64(held.address), size_t(held.size))
        return data.raw

    def sum(self) -> str:
        digest = hashlib.sha256()
        for held in self.held:
            digest.update(self.bytes(held) if held.here else b"away")
        return digest.hexdigest()

    # ---- the session

    def serve(self, folder: Path, faults: dict[tuple[Op, int], str]) -> str:
        inner = int(os.environ.get("INNER", os.getpid()))
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.chdir(folder)  # an address has 108 bytes
        peer.connect(wire.socket_name(inner))
        counts: Counter[Op] = Counter()
        hello = int(os.environ.get("SAYS", inner))
        peer.send(self.reply(Op.HELLO, value=hello, kind=wire.PROTOCOL))
        while True:
            packet, fds, _, _ = socket.recv_fds(peer, wire.REQUEST.size + 1, 2)
            if not packet:
                return "closed"
            request = wire.REQUEST.unpack(packet)
            op = Op(request["op"])
            counts[op] += 1
            fault = faults.pop((op, counts[op]), "")
            if fault == "die":
                os._exit(9)
            if fault == "close" or op is Op.END:
                peer.close()
                return "ended" if op is Op.END else "left"
            if fault == "silent":
                continue
            try:
                if fault.isdigit():
                    raise Failed(int(fault))
                reply, exported = self.answer(op, request, fds)
            except Failed as error:
                reply, exported = self.reply(op, error.args[0]), []
            socket.send_fds(peer, [reply], [] if fault == "bare" else exported)
            for fd in [*fds, *exported]:
                os.close(fd)

    def answer(self, op: Op, request: dict[str, int], fds: list[int]) -> tuple[Packet, list[int]]:
        if op is Op.NEXT:
            if request["argument"] >= len(self.held):
                raise Failed(-errno.ENOENT)
            held = self.held[request["argument"]]
            return self.reply(op, held=held, value=held.here), []
        if op is Op.SYNC:
            self.call("cuCtxSynchronize")
            return self.reply(op), []
        held = next((h for h in self.held if h.address == request["address"]), self.held[0])
        if held.address != request["address"]:
            raise Failed(-errno.ENOENT)
        self.current(held.device)
        exported: list[int] = []
        value = 0
        if op is Op.CHECKSUM:
            data = self.bytes(held)
            digest = hashlib.sha256(data if request["argument"] == 0 else data[:4096]).digest()
            value = int.from_bytes(digest[:8], "little")
        elif op is Op.EXPORT:
            fd = ctypes.c_int()
            self.call("cuMemExportToShareableHandle", ctypes.byref(fd), u64(held.handle), 1, u64(0))
            exported = [fd.value]
        elif op is Op.RELEASE:
            self.call("cuMemUnmap", u64(held.address), size_t(held.size))
            self.call("cuMemRelease", u64(held.handle))
            held.here = False
        elif op is Op.MAP:
            handle = u64()
            self.call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(fds[0]),
                1,
            )
            self.map(held, handle.value)
        elif op is Op.OWN:
            self.renew(held)
        return self.reply(op, held=held, value=value), exported

    def reply(
        self, op: Op, result: int = 0, held: Held | None = None, value: int = 0, kind: int = 0
    ) -> Packet:
        uuid = ctypes.create_string_buffer(16)
        if held is not None:
            self.call("cuDeviceGetUuid_v2", uuid, held.device)
        return wire.REPLY.struct.pack(
            op,
            result,
            held.address if held else 0,
            held.size if held else 0,
            value,
            held.device if held else 0,
            held.kind if held else kind,
            uuid.raw,
            b"as the test wishes" if result else b"",
        )


def main(library: str, folder: str, described: str) -> None:
    holder = Holder(library, described)
    faults = {}
    for word in filter(None, os.environ.get("FAULTS", "").split(",")):
        op, count, what = word.split(":")
        faults[Op[op], int(count)] = what
    print("ready", flush=True)
    for line in sys.stdin:
        word = line.strip()
        print(holder.serve(Path(folder), faults) if word == "serve" else holder.sum(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
