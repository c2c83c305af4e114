# SPDX-License-Identifier: Apache-2.0
"""Which files a tree was writing on shared paths, as CRIU's image has them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from image_edits import Field, encode

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.images import written_files
from liveshift.errors import StepFailed

PLACEMENT = Placement(("/shared", "/data"), ("/carried", "/shared/carried"))
REGULAR, SOCKET = 1, 4
NOTED = {b"/shared/append-only": 77, b"/shared/log": 1, b"/shared/closed": 5}
"""What our own survey of the frozen tree has noted."""


def entry(
    name: bytes, size: int, flags: int = os.O_WRONLY, kind: int = REGULAR, number: int = 7
) -> bytes:
    """A file_entry with a reg_file_entry: id, flags, pos, fown, name, mode, size."""
    regular: list[Field] = [(1, number), (2, flags), (3, 0), (5, b""), (6, name), (8, size)]
    return encode([(1, kind), (2, number), (3, encode(regular))])


def image(top: Path, *entries: bytes) -> Path:
    data = b"".join(struct.pack("<I", len(each)) + each for each in entries)
    (top / "files.img").write_bytes(struct.pack("<II", 0x54564319, 0x56303138) + data)
    return top


def found(top: Path, *entries: bytes) -> dict[bytes, int]:
    return written_files.shared(image(top, *entries), PLACEMENT, NOTED)[0]


def test_files_that_are_open_for_writing_are_found_with_their_sizes(tmp_path: Path) -> None:
    assert found(
        tmp_path,
        entry(b"/shared/log", 1000),
        entry(b"/shared/appended", 2000, os.O_RDWR | os.O_APPEND),
        entry(b"/data/empty", 0, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        entry(b"/shared/read", 4000, os.O_RDONLY),
        entry(b"/shared/read", 4000, os.O_RDONLY | os.O_CLOEXEC),
    ) == {b"/shared/log": 1000, b"/shared/appended": 2000, b"/data/empty": 0}


def test_a_file_that_is_open_twice_counts_if_one_writes(tmp_path: Path) -> None:
    twice = entry(b"/shared/log", 9, os.O_RDONLY), entry(b"/shared/log", 9)
    assert found(tmp_path, *twice) == found(tmp_path, *reversed(twice)) == {b"/shared/log": 9}


@pytest.mark.parametrize(
    "name", [b"/tmp/log", b"/dev/shm/x", b"/carried/x", b"/shared/carried/x", b"/etc/x", b"", b"x"]
)
def test_files_that_are_in_the_image_or_local_do_not_count(tmp_path: Path, name: bytes) -> None:
    assert found(tmp_path, entry(name, 5)) == {}


def test_what_is_no_regular_file_does_not_count(tmp_path: Path) -> None:
    assert found(tmp_path, entry(b"/shared/log", 5, kind=SOCKET)) == {}
    assert found(tmp_path, encode([(1, REGULAR), (2, 7)])) == {}


def test_a_size_may_have_64_bits(tmp_path: Path) -> None:
    large = 5 << 32
    assert found(tmp_path, entry(b"/shared/log", large)) == {b"/shared/log": large}


def without_size(name: bytes) -> bytes:
    flags = os.O_WRONLY | os.O_APPEND
    regular = encode([(1, 7), (2, flags), (3, 0), (5, b""), (6, name)])
    return encode([(1, REGULAR), (2, 7), (3, regular)])


def test_where_criu_notes_no_size_ours_counts(tmp_path: Path) -> None:
    """CRIU notes none of a file that is open only for appending."""
    name = b"/shared/append-only"
    made = image(tmp_path, without_size(name), entry(b"/shared/log", 5))
    sizes = {name: 77, b"/shared/log": 5}
    assert written_files.shared(made, PLACEMENT, NOTED) == (sizes, {name})
    assert found(tmp_path, without_size(b"/shared/unknown")) == {}
    twice = without_size(name), entry(name, 80)
    for entries in (twice, twice[::-1]):
        made = image(tmp_path, *entries)
        assert written_files.shared(made, PLACEMENT, NOTED) == ({name: 80}, set())


def test_a_name_that_is_not_utf_8_is_kept(tmp_path: Path) -> None:
    assert found(tmp_path, entry(b"/shared/log\xff", 5)) == {b"/shared/log\xff": 5}


def test_an_image_without_files_has_none(tmp_path: Path) -> None:
    assert written_files.shared(tmp_path, PLACEMENT, NOTED) == ({}, set())
    assert found(tmp_path) == {}


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\x7f", struct.pack("<I", 2) + b"\x1a\x7f"])
def test_a_damaged_image_is_an_error(tmp_path: Path, raw: bytes) -> None:
    image(tmp_path)
    with (tmp_path / "files.img").open("ab") as file:
        file.write(raw)
    with pytest.raises(StepFailed, match=r"the image is damaged|beyond the file"):
        written_files.shared(tmp_path, PLACEMENT, NOTED)


def test_files_on_carried_paths_count_also_if_they_are_only_read(tmp_path: Path) -> None:
    made = image(
        tmp_path,
        entry(b"/carried/log", 1000),
        entry(b"/carried/data", 1000, os.O_RDONLY),
        entry(b"/shared/log", 1000),
        entry(b"/tmp/log", 1000),
    )
    opened = {b"/carried/log", b"/carried/data"}
    assert written_files.carried(made, PLACEMENT) == (opened, {b"/carried/log"})


def test_what_has_the_name_of_a_file_that_was_deleted_is_another_one(tmp_path: Path) -> None:
    """CRIU keeps a deleted file in its image; remap-fpath.img says which one that is."""
    made = image(
        tmp_path,
        entry(b"/shared/deleted", 5, number=8),
        entry(b"/carried/deleted", 5, number=9),
        entry(b"/carried/log", 5),
    )
    lost = [encode([(1, number), (2, 99), (3, 2)]) for number in (8, 9)]
    data = b"".join(struct.pack("<I", len(each)) + each for each in lost)
    (made / "remap-fpath.img").write_bytes(struct.pack("<II", 0x54564319, 0x59133954) + data)
    assert written_files.shared(made, PLACEMENT, NOTED) == ({}, set())
    assert written_files.carried(made, PLACEMENT) == ({b"/carried/log"}, {b"/carried/log"})
