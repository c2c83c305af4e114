# SPDX-License-Identifier: Apache-2.0
"""What comes over the wire: messages, page headers, sealed and compressed chunks, manifests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import xxhash
from descriptors import no_descriptor_left

from fuzz import seeds
from fuzz.guard import Place
from fuzz.target import ALICE, Target
from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.errors import LiveshiftError
from liveshift.runtime import messages, wire
from liveshift.runtime.agent.arrival.image_place import SandboxPlace
from liveshift.runtime.agent.arrival.inbox import Inbox
from liveshift.runtime.control import local_socket
from liveshift.runtime.model import manifest
from liveshift.runtime.wire.announced import Announced, IncomingSeal
from liveshift.runtime.wire.compression import restore
from liveshift.runtime.wire.header import (
    HEADER,
    Header,
    read_answer,
    read_header,
    read_page_header,
)
from liveshift.runtime.wire.page_port import PagePort
from liveshift.runtime.wire.seal import TAG, Sealer
from liveshift.runtime.wire.wants import read_wants


def frame(data: bytes) -> None:
    try:
        frame = messages.decode(data)
    except LiveshiftError:
        return
    if frame.body is not None:
        again = messages.encode_request(frame.id, frame.body)
    elif frame.error is not None:
        again = messages.encode_error(frame.id, frame.error)
    else:
        again = messages.encode_answer(frame.id, frame.answer)
    assert repr(messages.decode(again)) == repr(frame)  # repr: NaN is like itself


def local() -> Target:
    loop = asyncio.new_event_loop()

    async def handler(_uid: int, ask: messages.Message) -> None:
        assert isinstance(ask, messages.Message)

    async def converse(data: bytes) -> None:
        reader, user = asyncio.StreamReader(loop=loop), local_socket._User()
        reader.feed_data(data)
        reader.feed_eof()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await local_socket._converse(reader, _Answers(), 7, user, handler)  # type: ignore[arg-type]

    def run(data: bytes) -> None:
        loop.run_until_complete(converse(data))

    return Target("local-socket", run, seeds.local_frames)


class _Answers:
    """Where the daemon writes to: whole frames, each of them a message."""

    def write(self, raw: bytes) -> None:
        (size,) = local_socket.LENGTH.unpack_from(raw)
        assert size == len(raw) - local_socket.LENGTH.size
        messages.decode(raw[local_socket.LENGTH.size :])

    async def drain(self) -> None:
        pass


def header(data: bytes) -> None:
    try:
        found = read_header(data)
    except LiveshiftError:
        return
    assert found.number >= 0
    assert found.migration
    assert found.stream


def compressed(data: bytes) -> None:
    size, chunk = int.from_bytes(data[:4], "little"), memoryview(data)[4:]
    try:
        found = restore(chunk, size)
    except LiveshiftError:
        return
    assert len(chunk) < len(found) == size <= wire.CHUNK


def answer(data: bytes) -> None:
    try:
        kind, value = read_answer(data)
        assert isinstance(kind, str)
        assert isinstance(value, (int, str, bytes))
        if isinstance(value, bytes):
            for _, address, pages in read_wants(value):
                assert 0 <= address < address + pages * 4096 <= 1 << 47
    except LiveshiftError:
        return


def manifests(data: bytes) -> None:
    try:
        found = manifest.decode(data)
    except LiveshiftError:
        return
    found.gone()
    assert manifest.decode(manifest.encode(found)) == found


def chunks() -> Target:
    """A whole conversation with the receiver, up to image files, trees and the manifest."""
    place = Place()

    def run(data: bytes) -> None:
        top = place.fresh()
        for name in ("images/m1", "tmp", "root/dev/shm", "carried"):
            (top / name).mkdir(parents=True)
        plan = SimpleNamespace(
            tmp=top / "tmp", log=top / "log", uid=ALICE.uid, gid=ALICE.gid, groups=ALICE.groups
        )
        resident: Any = SimpleNamespace(
            sandbox=SimpleNamespace(plan=plan, root=top / "root"),
            spec=SimpleNamespace(name="gpt/1"),
        )
        ahead: Any = SimpleNamespace(halt=lambda: None, lost="")
        there = SandboxPlace(top / "images/m1", resident, Placement((), (str(top / "carried"),)))
        there.top = lambda tree: _top(top, tree, there)  # type: ignore[method-assign]
        inbox = Inbox(there, None, 0, ahead)
        receiver = wire.Receiver("", "", Path(), "h1", [])
        receiver._known = SimpleNamespace(owner=lambda frame: "h0")  # type: ignore[assignment]
        receiver.expect("m1", "h0", inbox, 1 << 20)
        entry = receiver._open["m1"]
        with no_descriptor_left():
            for number, (stream, chunk) in enumerate(seeds.cut_chunks(data)):
                digest = xxhash.xxh3_64_intdigest(chunk)
                raw = msgspec.msgpack.encode(Header("m1", number, stream, digest))
                frames: Any = [SimpleNamespace(buffer=memoryview(f)) for f in (b"id", raw, chunk)]
                try:
                    _, header = receiver._worker(frames)
                except LiveshiftError:
                    break
                if receiver._answer(entry, header, frames)[0] == "refused":
                    break
            inbox.close()
        place.check()

    return Target("chunks", run, seeds.chunk_streams, 16384, places=[place])


def sealed(data: bytes) -> None:
    """What the announced source might seal, and the same from one that does not know the key."""
    taken: list[bytes] = []
    inlet: Any = SimpleNamespace(complete=False)
    pages = wire.PageStreams(
        lambda chunk: taken.append(bytes(chunk)),
        store_device=lambda process, at, chunk: taken.append(bytes(chunk)),
    )
    entry = Announced("m1", "h0", inlet, 0, pages, 4, IncomingSeal(bytes(32), 1, "key"))
    known: Any = SimpleNamespace(name_of=lambda key: "h0")
    port = PagePort("", [], {"m1": entry}.get, known)
    plain = memoryview(bytearray(wire.CHUNK))
    sealer, stranger = (Sealer(key, "pages") for key in (bytes(32), bytes(31) + b"x"))
    for name, chunk in seeds.cut_chunks(data):
        head = name.encode("latin-1")
        try:
            header = read_page_header(head)
            lane, number = header.lane, header.number
        except LiveshiftError:
            lane, number = 1, 0
        for who in (stranger, sealer):
            into = memoryview(bytearray(len(chunk) + TAG))
            try:
                sealed = who.seal(lane, number, head, chunk, into)
            except ValueError:  # what nobody seals twice
                continue
            frames: Any = [SimpleNamespace(buffer=memoryview(f)) for f in (b"id", head, sealed)]
            had = len(taken)
            try:
                answer = port._answer(read_page_header(head), frames, plain)
            except LiveshiftError:
                assert len(taken) == had
                continue
            assert who is sealer
            assert len(answer) < HEADER


def _top(top: Path, tree: str, there: SandboxPlace) -> Path:
    """The host's own directories are not for a fuzzer to write to."""
    found = SandboxPlace.top(there, tree)
    return top / "carried" if found == Path("/") else found
