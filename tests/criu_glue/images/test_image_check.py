# SPDX-License-Identifier: Apache-2.0
"""Images are held against what a capsule's can be before CRIU, as root, does what they say.

Here: which images there are, and whether they can be read; their tasks and files have tests of
their own.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from capsule_images import ALICE, ROOT, Image, plain, rich
from image_edits import encode

from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.images.image_kinds import COMMON_MAGIC, KINDS, kind_of
from liveshift.criu_glue.images.protobuf import Damaged, ProtobufMessage
from liveshift.errors import StepFailed

__all__ = ["plain", "rich"]

pytestmark = pytest.mark.root  # only root can act as another user


def test_what_criu_has_made_is_taken(plain: Image, tmp_path: Path) -> None:
    plain.check()
    plain.check(ROOT)
    (tmp_path / "2").mkdir()
    rich = Image(tmp_path / "2", "rich")
    rich.check()
    kinds = {kind_of(path.name) for path in rich.directory.iterdir()}
    assert len(kinds) > 20


@pytest.mark.parametrize("user", [ALICE, ROOT])
@pytest.mark.parametrize(
    "name",
    [
        "x.img",
        "mountpoints-1.img",
        "netns-2.img",
        "userns-1.img",
        "creds-1001.img",
        "apparmor.img",
        "core.img",
        "core-01.img",
        "core--1.img",
        "core-1001.img.img",
        "inventory-1.img",
        "ghost-file-G.img",
        "reg-files.img",
        "tmpfs-1.tar.gz.img",
    ],
)
def test_kinds_that_no_capsule_has(plain: Image, user: User, name: str) -> None:
    (plain.directory / name).write_bytes(plain.file("core-1001").read_bytes())
    with pytest.raises(StepFailed, match="of a kind that no capsule's image has"):
        plain.check(user)


def test_what_is_ours_beside_the_images_is_not_looked_at(plain: Image) -> None:
    for name in ("manifest", "came", "arrival", "restore.log", "held"):
        (plain.directory / name).write_bytes(b"ours")
    plain.check()


@pytest.mark.parametrize(
    "name", ["inventory", "core-1001", "files", "ghost-file-1", "pagemap-1001"]
)
def test_wrong_magic_words(plain: Image, name: str) -> None:
    raw = plain.file(name).read_bytes()
    for damaged in (b"", raw[:3], b"\0" * 8 + raw[8:], bytes([raw[0] ^ 1]) + raw[1:], b"#!/bin/sh"):
        plain.file(name).write_bytes(damaged)
        with pytest.raises(StepFailed, match=f"{name}.img' is an image without the magic words"):
            plain.check(ROOT)


@pytest.mark.parametrize("name", [n for n, kind in KINDS.items() if n not in ("pages", "tty-data")])
def test_lengths_that_lead_out_of_a_file(rich: Image, name: str) -> None:
    files = [p for p in rich.directory.glob(f"{name}*.img") if kind_of(p.name) == name]
    path = files[0] if files else rich.file(name)
    if not files:  # this image has none of that kind
        empty = struct.pack("<III", COMMON_MAGIC, KINDS[name].magic, 0)
        path.write_bytes(empty)
        rich.check(ROOT)
    raw = path.read_bytes()
    at = 4 if name == "inventory" else 8
    for size in (0xFFFFFFFF, len(raw) - at - 3):
        path.write_bytes(raw[:at] + struct.pack("<I", size) + raw[at + 4 :])
        with pytest.raises(StepFailed, match=r"ends beyond the file|cut off|entries, expected one"):
            rich.check(ROOT)
    path.write_bytes(raw[: at + 2])
    with pytest.raises(StepFailed, match="cut off"):
        rich.check(ROOT)


@pytest.mark.parametrize(
    "name",
    [
        "inventory",
        "pstree",
        "files",
        "core-1001",
        "core-1002",
        "mm-1001",
        "ids-1001",
        "fs-1001",
        "pagemap-1001",
    ],
)
def test_images_that_are_missing_are_named(plain: Image, name: str) -> None:
    plain.file(name).unlink()
    with pytest.raises(StepFailed, match=f"the image is not complete: {name}.img is missing"):
        plain.check(ROOT)


def test_one_entry_where_criu_reads_one(plain: Image) -> None:
    """The second would be another's, and CRIU takes the first: no two may differ."""
    (entry,) = plain.entries("core-1001")
    plain.write("core-1001", [entry, entry])
    with pytest.raises(StepFailed, match="of 2 entries, expected one"):
        plain.check()
    plain.write("core-1001", [])
    with pytest.raises(StepFailed, match="of 0 entries, expected one"):
        plain.check()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x08",
        b"\x08\x80",
        b"\x0a\x05abc",
        b"\x00\x01",
        b"\x0b",
        b"\x0c",
        b"\x09\0\0",
        b"\x08" + b"\xff" * 9 + b"\x02",
        b"\x08" + b"\x80" * 11,
        b"\xff\xff\xff\xff\xff\x01\x00",
    ],
)
def test_bytes_that_are_no_message(raw: bytes) -> None:
    with pytest.raises(Damaged):
        ProtobufMessage(raw)


def test_a_message_is_read_as_it_was_written() -> None:
    message = ProtobufMessage(
        encode([(1, 7), (2, b"text"), (3, encode([(1, (1 << 64) - 1)])), (4, 1), (4, 2)])
    )
    assert message.uint(1) == 7
    assert bytes(message.raw(2) or b"") == b"text"
    assert message.uints(4) == [1, 2]
    assert message.uint(9, 5) == 5
    assert 3 in message
    assert 9 not in message
    inner = message.message(3)
    assert inner is not None
    for wrong in (
        lambda: inner.uint(1),
        lambda: message.uint(2),
        lambda: message.raw(1),
        lambda: message.uint(9),
        lambda: message.uint(4),
        lambda: message.raws(1),
    ):
        with pytest.raises(Damaged):
            wrong()
