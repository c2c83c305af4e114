# SPDX-License-Identifier: Apache-2.0
"""Images that CRIU made of a user's capsule, to be changed and held against what it may hold.

They are those of tests/fuzz/seeds; what a hostile source would change in them is changed here,
message by message.
"""

from __future__ import annotations

import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import checkout
import pytest
from image_edits import Field, change_first, encode, put

from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.images import (
    file_locks,
    ghosts,
    image_check,
    image_rights,
)
from liveshift.criu_glue.images.protobuf import ProtobufMessage

SEEDS = checkout.ROOT / "tests" / "fuzz" / "seeds"
ALICE = User(64001, 64001)
BOB = User(64002, 64002)
ROOT = User(0, 0)


class Image:
    """An image directory, and the sandbox its paths lead into."""

    def __init__(self, place: Path, name: str) -> None:
        self.directory = place / "images"
        self.directory.mkdir()
        with tarfile.open(SEEDS / f"{name}.tar.xz") as archive:
            archive.extractall(self.directory)
        self.sandbox = place / "sandbox"
        for folder in ("tmp", "dev/shm", "usr/bin", "etc"):
            (self.sandbox / folder).mkdir(parents=True)
        for folder in ("tmp", "dev/shm"):
            (self.sandbox / folder).chmod(0o1777)
        for directory in (place, *place.parents):
            directory.chmod(directory.stat().st_mode | 0o111)

    def check(self, user: User = ALICE) -> None:
        """All that is checked before CRIU sees the image, which stays as it is."""
        changes = (ghosts, "bring_home"), (file_locks, "refuse_held")
        with pytest.MonkeyPatch.context() as patch:
            for module, name in changes:
                patch.setattr(module, name, lambda *_: None)
            image_check.prepare(self.directory, user, self.sandbox)

    def make(self, path: str, mode: int, uid: int = 0) -> Path:
        made = self.sandbox / path.lstrip("/")
        made.touch()
        os.chown(made, uid, uid)
        made.chmod(mode)
        return made

    def file(self, name: str) -> Path:
        return self.directory / f"{name}.img"

    def entries(self, name: str) -> list[bytes]:
        raw, at, found = self.file(name).read_bytes(), 8 - 4 * (name == "inventory"), []
        while at < len(raw):
            (size,) = struct.unpack_from("<I", raw, at)
            found.append(raw[at + 4 : at + 4 + size])
            at += 4 + size
        return found

    def write(self, name: str, entries: list[bytes]) -> None:
        head = self.file(name).read_bytes()[: 8 - 4 * (name == "inventory")]
        packed = b"".join(struct.pack("<I", len(entry)) + entry for entry in entries)
        self.file(name).write_bytes(head + packed)

    def change(self, name: str, path: tuple[int, ...], value: int | bytes | None) -> None:
        change_first(self.file(name), path, value)

    def change_file(
        self, which: Callable[[ProtobufMessage], bool], path: tuple[int, ...], value: int | bytes
    ) -> None:
        entries = self.entries("files")
        at = next(n for n, entry in enumerate(entries) if which(ProtobufMessage(entry)))
        entries[at] = put(entries[at], path, value)
        self.write("files", entries)

    def add_file(self, *found: Field) -> None:
        self.write("files", [*self.entries("files"), encode(list(found))])

    def reg(self, number: int, path: str, flags: int) -> None:
        owner = encode([(n, 0) for n in range(1, 6)])
        about = encode([(1, number), (2, flags), (3, 0), (5, owner), (6, path.encode())])
        self.add_file((1, image_rights.REG), (2, number), (3, about))


@pytest.fixture
def plain(tmp_path: Path) -> Image:
    return Image(tmp_path, "plain")


@pytest.fixture
def rich(tmp_path: Path) -> Image:
    return Image(tmp_path, "rich")
