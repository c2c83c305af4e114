# SPDX-License-Identifier: Apache-2.0
"""Inputs to begin with: what the other side really sends.

``seeds/plain.tar.xz`` and ``rich.tar.xz`` are images that CRIU 4.2 made of a Python program with
uid 64001, a thread and a deleted file, and of one with children and most kinds of open files;
without the pages of its memory.
"""

from __future__ import annotations

import base64
import functools
import io
import struct
import sys
import tarfile
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash
import zmq
import zstandard
from zmq.utils import z85

from liveshift.criu_glue.files import sparse, trees
from liveshift.criu_glue.images.image_kinds import KINDS
from liveshift.criu_glue.survey.epoll_sets import EpollEntry
from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.interposer import device_session, layout
from liveshift.runtime import messages
from liveshift.runtime.agent.gpu.device_state import SavedDevices
from liveshift.runtime.messages import RunJob
from liveshift.runtime.messages import frames as _frames
from liveshift.runtime.model import manifest as manifests
from liveshift.runtime.model import run_spec
from liveshift.runtime.snapshot.saved_snapshot import SavedCapsule, SavedSnapshot
from liveshift.runtime.wire import small_images as packing
from liveshift.runtime.wire.header import Header, PageHeader

OUTPUT = "output:" + "0" * 20
FOLDER = Path(__file__).parent / "seeds"
EXAMPLE = Path(__file__).parents[2] / "docs" / "cluster.example.toml"


def _value(hint: Any) -> Any:
    """Some value of a field's type."""
    plain = {str: "gpt/1", int: 7, float: 1.5, bool: True, bytes: b"raw", type(None): None}
    if hint in plain:
        return plain[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(arguments[0])
    if origin is list:
        return [_value(arguments[0])]
    if origin is dict:
        return {_value(arguments[0]): _value(arguments[1])}
    if origin is tuple:
        return tuple(_value(a) for a in arguments if a is not Ellipsis)
    hints = typing.get_type_hints(hint)
    names = getattr(hint, "__struct_fields__", tuple(hints))
    return hint(**{name: _value(hints[name]) for name in names})


def frames() -> list[bytes]:
    asks = [messages.encode_request(3, _value(kind)) for kind in typing.get_args(_frames.ASKS)]
    answers = [messages.encode_answer(4, _value(k)) for k in typing.get_args(_frames.ANSWERS)]
    error = messages.encode_error(5, ("Refused", "no spare", "taint fewer"))
    return [*asks, *answers, messages.encode_answer(6, None), error]


def local_frames() -> list[bytes]:
    framed = [struct.pack("<I", len(raw)) + raw for raw in frames()]
    return [*framed, b"".join(framed[:4]), framed[0][:-3], b"\xff\xff\xff\x7f" + bytes(8)]


def headers() -> list[bytes]:
    streams = ("image:core-1001.img", "tree:1:tmp", "tree:2:carried:/data/x", OUTPUT, "manifest")
    made = (Header("m-1", n * 1000, s, (1 << 64) - 1 - n) for n, s in enumerate(streams))
    return [msgspec.msgpack.encode(header) for header in made]


def page_headers() -> list[bytes]:
    """What stands before sealed chunks, and what is in them (see :func:`cut_chunks`)."""
    made = [
        (PageHeader("m1", 1, 0, "memory", 0), b"chunk"),
        (PageHeader("m1", 1, 1, "rate", 0), b"?"),
        (PageHeader("m1", 32, 0, "memory", 1000), zstandard.compress(b"x" * 1000)),
        (PageHeader("m1", 1, 2, "memory", 0), b""),
        (PageHeader("m2", 3, (1 << 63) - 1, "memory", 0), b"x"),
        (PageHeader("m1", 2, 0, "device", 0, 1001, 16 << 20), b"device memory"),
        (PageHeader("m1", 2, 1, "device", 0, (1 << 63) - 1, (1 << 63) - 1), b""),
    ]
    framed = [
        bytes([len(raw)]) + raw + struct.pack("<H", len(data)) + data
        for raw, data in ((msgspec.msgpack.encode(header), data) for header, data in made)
    ]
    return [*framed, b"".join(framed)]


def compressed() -> list[bytes]:
    """How much a chunk holds (4 bytes), and the chunk."""
    plain = (b"x" * 1000, bytes(range(256)) * 40, bytes(1 << 20))
    whole = zstandard.ZstdCompressor(level=1)
    streamed = zstandard.ZstdCompressor(write_content_size=False)
    made = [(data, form.compress(data)) for data in plain for form in (whole, streamed)]
    return [struct.pack("<I", len(data)) + small for data, small in made]


def answers() -> list[bytes]:
    said = (("ack", 7), ("again", 1 << 40), ("refused", "No space left on device"))
    return [msgspec.msgpack.encode(answer) for answer in said]


def manifests_of(streams: dict[str, bytes]) -> bytes:
    sizes = {s: (len(d), xxhash.xxh3_64_intdigest(d)) for s, d in streams.items()}
    gone = {"tmp": [b"gone", b"\xff"]}
    pipes, epoll = {4026531: 20, 4026532: 21}, [EpollEntry(1001, 3, 7, 1002, 7, 12, 25, 1 << 63)]
    made = manifests.Manifest(manifests.VERSION, "m1", "gpt/1", 9, sizes, pipes, gone, epoll)
    return manifests.encode(made)


def small_images() -> list[bytes]:
    """The common stream as a dump packs it, after a byte that says where it is cut."""
    sent = bytearray()
    packer = packing.SmallImagePacker(lambda _, raw: sent.extend(raw))
    for name, size in (("core-1.img", 900), ("fs-1.img", 40), ("empty.img", 0)):
        if size:
            packer(name, bytes(range(size % 251)) * 4)
        packer(name, b"")
    packer.finish()
    return [b"\x80" + bytes(sent), b"\x01" + bytes(sent)]


def manifest_seeds() -> list[bytes]:
    return [manifests_of({}), manifests_of({OUTPUT: b"x", "image:core-1001.img": b"registers"})]


def saved_snapshots() -> list[bytes]:
    run = RunJob("gpt", 2, ["torchrun", "train.py"], {"A": "b"}, "/", 100, [100])
    spec = base64.b64encode(run_spec.encode(run, 1000)).decode()
    capsules = {f"gpt/{n}": SavedCapsule(n, f"s17.{n}", "0" * 64) for n in range(2)}
    saved = SavedSnapshot(
        *(1, "gpt", "s17", "step 9", 1e9, "west", "10.99.0.0/24", 500, spec, capsules)
    )
    line = {"key": "0" * 64, "signature": base64.b64encode(bytes(64)).decode()}
    return [msgspec.json.encode(saved) + b"\n" + msgspec.json.encode(line)]


def chunk_streams() -> list[bytes]:
    """Whole conversations, in the form that :func:`cut_chunks` reads."""
    tree = _tar(("directory", tarfile.DIRTYPE, {}), ("directory/file", tarfile.REGTYPE, {}))
    said = {"image:core-1001.img": b"registers", OUTPUT: b"line\n", "tree:1:tmp": tree}
    said["tree:2:open"] = _tar(("file", tarfile.REGTYPE, {}))
    parts = [(s, d) for s, d in said.items()] + [(s, b"") for s in said]
    parts += [("manifest", manifests_of(said)), ("manifest", b"")]
    return [b"".join(_chunk(s, d) for s, d in parts), b"".join(_chunk(s, d) for s, d in parts[:3])]


def _chunk(stream: str, data: bytes) -> bytes:
    name = stream.encode()
    return bytes([len(name)]) + name + struct.pack("<H", len(data)) + data


def cut_chunks(data: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at < len(data):
        name = data[at + 1 : at + 1 + data[at]]
        at += 1 + data[at]
        size = int.from_bytes(data[at : at + 2], "little")
        yield name.decode("latin-1") or "x", data[at + 2 : at + 2 + size]
        at += 2 + size


@functools.cache
def images(name: str = "rich") -> dict[str, bytes]:
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        return {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]


@functools.cache
def image_names() -> list[str]:
    """Every kind of image once at least, those of the images first."""
    kinds = [name + ("-1001" if kind.number else "") + ".img" for name, kind in KINDS.items()]
    return [*images(), *(name for name in kinds if name not in images())]


def image_files() -> list[bytes]:
    """Each with its number before it."""
    names = image_names()
    found = [bytes([names.index(name)]) + raw for name, raw in images().items()]
    plain = images("plain").items()
    return found + [bytes([names.index(name)]) + raw for name, raw in plain if name in names]


def pagemaps() -> list[bytes]:
    return [raw for name, raw in images().items() if name.startswith("pagemap")]


def protobufs() -> list[bytes]:
    return [raw[12:] for raw in images().values() if len(raw) > 12]


def announcements() -> list[bytes]:
    said = [b"\x0a" + bytes([len(name)]) + name.encode() for name in image_names()]
    return [struct.pack("<I", len(message)) + message for message in said]


def _tar(*entries: tuple[str, bytes, dict[str, Any]]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(mode="w", fileobj=raw, format=tarfile.PAX_FORMAT) as archive:
        for name, kind, more in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mtime, info.uid, info.gid = kind, 10**9, 64001, 64001
            content = more.pop("content", b"content" * 30 if kind == tarfile.REGTYPE else b"")
            info.size = len(content)
            for key, value in more.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return raw.getvalue()[: raw.tell() // 512 * 512][:6144]


def _with_holes(
    name: str, size: int, *extents: tuple[int, bytes]
) -> tuple[str, bytes, dict[str, object]]:
    content = b"".join(struct.pack("<QQ", at, len(data)) + data for at, data in extents)
    return name, tarfile.REGTYPE, {"pax_headers": {sparse.HEADER: str(size)}, "content": content}


def tars() -> list[bytes]:
    """As trees.pack makes them, before each a byte that says how they are unpacked."""
    reg, link, sym, fifo, char = (
        tarfile.REGTYPE,
        tarfile.LNKTYPE,
        tarfile.SYMTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
    )
    made = [
        _tar((".", tarfile.DIRTYPE, {}), ("a", tarfile.DIRTYPE, {}), ("a/b", reg, {})),
        _tar(("a", reg, {}), ("b", link, {"linkname": "a"}), ("c", sym, {"linkname": "/x"})),
        _tar(("up", reg, {}), ("up/file", reg, {}), ("there", reg, {"mtime": 2**32})),
        _tar(("f", fifo, {}), ("c", char, {"devmajor": 1, "devminor": 3})),
        _tar(("s", reg, {"mode": 0o6755}), ("r", reg, {"mode": 0o4755, "uid": 0})),
        _tar(("é" * 90, reg, {"pax_headers": {trees.FORCED: "1", "mtime": "1000000000.5"}})),
        _tar(("d/e/f", reg, {}), ("../beside/file", reg, {}), ("/etc/x", reg, {})),
        _tar(_with_holes("s", 1 << 40, (0, b"begins"), (1 << 20, b"data" * 30), (1 << 30, b"x"))),
        _tar(_with_holes("none", 1 << 20), _with_holes("s", 100, (8, b"x" * 92), (8, b"again"))),
    ]
    return [bytes([how]) + raw for raw in made for how in (0, 1, 2, 3, 6)]


def pages() -> list[bytes]:
    """A page with a counter, a clock and a communicator, and pieces of it."""
    raw = bytearray(layout.COMMUNICATORS_AT + layout.COMMUNICATOR.size)
    layout.IDENTITY.struct.pack_into(
        raw, 0, layout.MAGIC, layout.LAYOUT, 1, 7, 0, 2, 0, 10**9, b"0.1.0", b"python"
    )
    layout.TABLES.struct.pack_into(raw, layout.TABLES_AT, 1, 1, 0, 0, 4)
    layout.COUNTER.struct.pack_into(raw, layout.COUNTERS_AT, b"gloo.allreduce", 10)
    layout.THREAD.struct.pack_into(raw, layout.THREADS_AT, 1234, ord("P"), 0, 1, 0, 0)
    layout.CLOCK.struct.pack_into(raw, layout.CLOCKS_AT, 77, 6, 5, 0, 6, 0, -1, -1, 1234, 0, 1)
    layout.COMMUNICATOR.struct.pack_into(
        raw,
        layout.COMMUNICATORS_AT,
        1,
        2,
        77,
        0,
        8,
        3,
        0,
        ord("I"),
        1,
        0,
        b"tp",
        b"",
        b"",
        b"",
        0,
        0,
        5,
    )
    return [bytes(raw), bytes(raw[: layout.HEADER_SIZE]), bytes(64)]


def configs() -> list[bytes]:
    small = b"""[cluster]
name = "c"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "10.88.0.10"
memory = "8GiB"
[files]
carried = ["/data/x", '''/y''']
[env]
set = { A = "1", "b c" = \"\"\"x\"\"\" }
[timeouts]
heartbeat = 1.5
"""
    return [small, *([EXAMPLE.read_bytes()[:4096]] if EXAMPLE.exists() else [])]


def keys() -> list[bytes]:
    public, secret = zmq.curve_keypair()
    return [b"\0" + secret + b"\n", b"\1" + public + b"\n", b"\0" + z85.encode(bytes(32))]


def device_tables() -> list[bytes]:
    blocks = [Block(0x7F00_0000_0000 + n * (2 << 20), 2 << 20, "GPU-1", 15) for n in range(2)]
    sums = {block.address: 2**64 - 1 for block in blocks}
    saved = [SavedDevices(1001, blocks, {"GPU-1": 5 << 20}, sums, 4), SavedDevices(1002)]
    return [msgspec.msgpack.encode(saved), msgspec.msgpack.encode(saved[1:])]


def device_replies() -> list[bytes]:
    """Of NEXT, of a refusal with words, of an error number that there is not."""
    gpu = bytes(range(16))
    return [
        device_session.REPLY.struct.pack(1, 0, 0x7F0000000000, 2 << 20, 1, 0, 15, gpu, b""),
        device_session.REPLY.struct.pack(3, -2, 0, 0, 0, 0, 0, gpu, b"no arena block begins there"),
        device_session.REPLY.struct.pack(5, -(2**31), 0, 0, 0, 0, 0, gpu, b""),
    ]


def outputs() -> list[bytes]:
    records = [struct.pack("<QII", 10**18 + n, 5, n) + b"line\n" for n in range(3)]
    return [b"".join(records), records[0][:-1], struct.pack("<QII", 1, 0xFFFFFFFF, 1) + b"x"]


def elfs() -> list[bytes]:
    note = struct.pack("<III4s", 4, 20, 3, b"GNU\0") + bytes(range(20))
    head = b"\x7fELF\x02\x01" + bytes(26) + struct.pack("<Q", 64) + bytes(14)
    head += struct.pack("<HH", 56, 1) + bytes(6)
    segment = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(note), len(note), 4)
    return [head + segment + note, Path(sys.executable).resolve().read_bytes()[:2048]]
