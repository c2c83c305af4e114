# SPDX-License-Identifier: Apache-2.0
"""Every parser that reads bytes from outside, one target each, with seeds of real encodings.

A target's ``run`` returns for an input that was understood or refused as declared; anything else
it raises is a finding. ARCHITECTURE of a run: guard.py says what no input may do.
"""

from __future__ import annotations

import io
import os
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fuzz import memory_inputs, seeds, wire_inputs
from fuzz.guard import Place
from fuzz.target import ALICE, ROOT, Target
from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.criu.capture import announced_name, announced_size
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.files.sparing import Sparing
from liveshift.criu_glue.files.unpacking import Unpacker
from liveshift.criu_glue.images import image_check
from liveshift.criu_glue.images.image_kinds import ImageFile
from liveshift.criu_glue.images.protobuf import Damaged, ProtobufMessage, fields
from liveshift.criu_glue.survey.survey import build_id
from liveshift.cuda_snapshot.checkpoint import uuid_text
from liveshift.errors import ConfigError, LiveshiftError, StepFailed
from liveshift.interposer import device_session, layout, page, page_directory
from liveshift.runtime.agent.gpu import device_memory
from liveshift.runtime.config import cluster as config
from liveshift.runtime.config.toml_lines import key_lines
from liveshift.runtime.control import keys
from liveshift.runtime.control.signatures import Signatures
from liveshift.runtime.snapshot import saved_snapshot
from liveshift.runtime.wire import small_images


def build(name: str) -> Target:
    """The target of that name; those that need a directory make it now."""
    return TARGETS[name]()


# ---- images ------------------------------------------------------------------------------------


def _protobuf(data: bytes) -> None:
    _walk(memoryview(data), 0)


def _walk(raw: memoryview, depth: int) -> None:
    try:
        message = ProtobufMessage(raw)
        numbers = [number for number, _ in fields(raw)]
    except Damaged:
        return
    for number in set(numbers[:50]):
        for look in (message.uint, message.uints, message.raw, message.raws):
            try:
                look(number)
            except Damaged:
                continue
        if depth < 3:
            for part in _or_none(message.raws, number) or []:
                _walk(part, depth + 1)


def _or_none(look: Callable[[int], list[memoryview]], number: int) -> list[memoryview] | None:
    try:
        return look(number)
    except Damaged:
        return None


def _image_file() -> Target:
    """The frame of one file: the first byte picks its kind."""
    place = Place()

    def run(data: bytes) -> None:
        names = seeds.image_names()
        path = place.inside / names[data[0] % len(names) if data else 0]
        path.write_bytes(data[1:])
        with suppress(StepFailed):
            for entry in ImageFile(path).entries:
                _walk(entry, 0)
        path.unlink()

    return Target("image-file", run, seeds.image_files, 16384, places=[place])


def _image() -> Target:
    """A whole image, one of its files taken from the input."""
    place = Place()
    whole = seeds.images()
    for name, raw in whole.items():
        (place.inside / name).write_bytes(raw)
    sandbox = place.inside / "sandbox"  # where its paths lead to
    for name in ("tmp", "dev/shm", "usr/bin"):
        (sandbox / name).mkdir(parents=True)
    (sandbox / "tmp").chmod(0o1777)

    def run(data: bytes) -> None:
        names = seeds.image_names()
        name = names[data[0] % len(names) if data else 0]
        path = place.inside / name
        path.write_bytes(data[1:])
        try:
            image_check.prepare(place.inside, ALICE, sandbox)
        except StepFailed:
            pass
        finally:
            if name in whole:
                path.write_bytes(whole[name])
            else:
                path.unlink()
            (place.inside / "files.img").write_bytes(whole["files.img"])  # it may be rewritten
        place.check()

    return Target("image", run, seeds.image_files, 16384, places=[place])


def _announcement(data: bytes) -> None:
    """CRIU's words on its image stream: a length, and a message of that length."""
    try:
        size = announced_size(data[:4].ljust(4, b"\0"))
        name = announced_name(data[4 : 4 + size])
    except StepFailed:
        return
    assert len(name) <= 4096


# ---- trees -------------------------------------------------------------------------------------


def _devices(data: bytes) -> None:
    """What a source says of device memory: whatever is understood can be summed up."""
    try:
        table = device_memory.decode(data)
    except StepFailed:
        return
    assert all(process.bytes >= 0 for process in table)


def _device_reply(data: bytes) -> None:
    """A process's answer in a device session."""
    try:
        reply = device_session.reply(data)
    except ValueError:
        return
    assert reply.failure.isprintable()
    assert bool(reply.failure) == bool(reply.result)
    assert len(uuid_text(reply.uuid)) == 40


def _tar() -> Target:
    """The first byte says whose tree it is and how it is to be unpacked."""
    place = Place()

    def run(data: bytes) -> None:
        how = data[0] if data else 0
        top = place.fresh()
        os.chown(top, *((ALICE.uid, ALICE.gid) if how & 4 else (-1, -1)))
        (top / "there").write_bytes(b"another's")
        (top / "up").symlink_to("../beside")
        user = ALICE if how & 2 else User(0, 0)
        sparing = Sparing() if how & 1 else None
        running = bool(how & 8)
        unpacker = Unpacker(top, sparing, user, single=bool(how & 4), running=running)
        steps: tuple[Callable[[], None], ...] = (lambda: unpacker.write(data[1:]), unpacker.finish)
        for step in steps:
            with suppress(StepFailed, OSError):
                step()
        place.check()
        if how & 2 and ROOT:
            _no_right_of_others(top)

    return Target("tar", run, seeds.tars, 8192, places=[place])


def _no_right_of_others(top: Path) -> None:
    for directory, folders, names in os.walk(top):
        for name in (*folders, *names):
            s = os.lstat(os.path.join(directory, name))
            kind, bits = s.st_mode >> 12, s.st_mode & 0o7777
            assert kind not in (2, 6), f"{name} is a device"
            if kind == 8:
                assert not bits & 0o4000 or s.st_uid == ALICE.uid, f"{name} runs as {s.st_uid}"
                assert not bits & 0o2000 or ALICE.is_in(s.st_gid), f"{name} runs as {s.st_gid}"


def _memory() -> Target:
    place = Place()
    run = memory_inputs.conversation(place)
    return Target("memory", run, memory_inputs.conversations, 16384, places=[place])


def _memory_index() -> Target:
    place = Place()
    return Target(
        "memory-index", memory_inputs.index(place), memory_inputs.indexes, 512, places=[place]
    )


def _memory_generation() -> Target:
    place = Place()
    run = memory_inputs.generation_index(place)
    return Target("memory-generation", run, memory_inputs.generation_indexes, 512, places=[place])


class _Anybody(Signatures):
    """Every signature counts: what a trusted cluster has signed is read too."""

    def check(self, data: bytes, key: str, signature: bytes, what: str) -> str:
        return ""


def _saved_snapshot(data: bytes) -> None:
    try:
        saved, _ = saved_snapshot.decode(data, _Anybody(Path("/none")), "/kept")
        saved.request()
    except LiveshiftError:
        return


# ---- what jobs, users and operators write ------------------------------------------------------


def _page() -> Target:
    place = Place()

    def run(data: bytes) -> None:
        path = place.inside / "7"
        path.write_bytes(data)
        for look in (lambda: page.read(path), lambda: page_directory.pages(place.inside)):
            try:
                found = look()
            except page.PageError:
                continue
            for one in found if isinstance(found, list) else [found]:
                assert (one.command + one.version).isprintable()
                assert all(kind.isprintable() for kind in one.begun)
        with suppress(page.PageError), page.opened(path) as file:
            for row in file.communicators():
                assert (row.name + row.unsafe + row.made_by).isprintable()
            file.waiting()
            file.order()
            file.ledger()

    largest = layout.COMMUNICATORS_AT + 2 * layout.COMMUNICATOR.size
    return Target("page", run, seeds.pages, largest, places=[place])


def _config() -> Target:
    place = Place()
    path = place.inside / "cluster.toml"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            reading = config.read(path)
        except ConfigError:
            pass
        else:
            assert config.parse(config.dump(reading.cluster)).cluster == reading.cluster
        _lines(data)

    return Target("config", run, seeds.configs, 4096, places=[place])


def _lines(data: bytes) -> None:
    """Whatever tomllib accepts has all its keys found, in the order of lines."""
    try:
        text = data.decode()
        tables = tomllib.loads(text)
    except (ValueError, RecursionError):
        return
    try:
        found = key_lines(text)
    except RecursionError:
        return
    assert all((key,) in found for key in tables)
    assert all(1 <= line <= text.count("\n") + 1 for line in found.values())


def _key() -> Target:
    place = Place()
    keys.init(place.inside, ["h0"])
    secret, public = (f(place.inside, "h0") for f in (keys.secret_path, keys.public_path))
    originals = secret.read_bytes(), public.read_bytes()

    def run(data: bytes) -> None:
        path = (secret, public)[data[0] & 1 if data else 0]
        path.write_bytes(data[1:])
        try:
            keys.load_private(place.inside, "h0")
            keys.public_keys(place.inside)
        except LiveshiftError:
            pass
        finally:
            for original, raw in zip((secret, public), originals, strict=True):
                original.write_bytes(raw)

    return Target("key", run, seeds.keys, 256, places=[place])


def _output(data: bytes) -> None:
    end = output.whole(data)
    records = list(output.split(data))
    again = b"".join(
        output.HEADER.pack(r.realtime_ns, len(r.data), r.stream) + r.data for r in records
    )
    assert again == data[:end]
    assert end <= len(data)


def _small_images(data: bytes) -> None:
    """The common stream of small images, in two pieces that are cut anywhere."""
    cut = data[0] * len(data) // 256 if data else 0
    kept: list[tuple[str, bytes]] = []
    unpacker = small_images.SmallImageUnpacker(lambda name, raw: kept.append((name, bytes(raw))))
    try:
        unpacker.write(data[1:cut])
        unpacker.write(data[max(1, cut) :])
        unpacker.check_ended()
    except LiveshiftError:
        pass
    assert all(len(raw) <= small_images.SMALL for _, raw in kept)
    assert sum(len(raw) for _, raw in kept) <= len(data)


def _elf(data: bytes) -> None:
    """A file that a job has mapped: its build id is read."""
    assert len(build_id(io.BytesIO(data))) <= 2 * 65536


TARGETS: dict[str, Callable[[], Target]] = {
    "frame": lambda: Target("frame", wire_inputs.frame, seeds.frames),
    "local-socket": wire_inputs.local,
    "header": lambda: Target("header", wire_inputs.header, seeds.headers),
    "sealed": lambda: Target("sealed", wire_inputs.sealed, seeds.page_headers),
    "compressed": lambda: Target("compressed", wire_inputs.compressed, seeds.compressed),
    "answer": lambda: Target("answer", wire_inputs.answer, seeds.answers, 512),
    "manifest": lambda: Target("manifest", wire_inputs.manifests, seeds.manifest_seeds),
    "chunks": wire_inputs.chunks,
    "protobuf": lambda: Target("protobuf", _protobuf, seeds.protobufs),
    "image-file": _image_file,
    "image": _image,
    "announcement": lambda: Target("announcement", _announcement, seeds.announcements, 512),
    "devices": lambda: Target("devices", _devices, seeds.device_tables),
    "device-reply": lambda: Target("device-reply", _device_reply, seeds.device_replies, 512),
    "tar": _tar,
    "memory": _memory,
    "memory-index": _memory_index,
    "memory-generation": _memory_generation,
    "pagemap": lambda: Target("pagemap", memory_inputs.pagemap, seeds.pagemaps),
    "saved-snapshot": lambda: Target("saved-snapshot", _saved_snapshot, seeds.saved_snapshots),
    "page": _page,
    "config": _config,
    "key": _key,
    "output": lambda: Target("output", _output, seeds.outputs),
    "small-images": lambda: Target("small-images", _small_images, seeds.small_images),
    "elf": lambda: Target("elf", _elf, seeds.elfs),
}

PACES = {
    "frame": 20,
    "header": 20,
    "sealed": 10,
    "answer": 20,
    "manifest": 20,
    "announcement": 10,
    "output": 10,
    "devices": 10,
    "device-reply": 20,
    "local-socket": 10,
    "elf": 10,
    "protobuf": 4,
    "page": 4,
    "config": 4,
    "key": 4,
    "image-file": 4,
    "pagemap": 10,
    "compressed": 4,
    "small-images": 10,
    "saved-snapshot": 20,
}
"""Executions of a target for each one of the slowest."""
