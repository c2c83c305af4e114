# SPDX-License-Identifier: Apache-2.0
"""One file of a saved image comes back byte for byte with its holes, or it is refused."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from liveshift.errors import StepFailed
from liveshift.runtime.agent.holding import saved_file
from liveshift.runtime.agent.holding.saved_file import SavedFile

LARGE = 1 << 30
BLOCK = 1 << 16
PARTS = (0, 5 << 20, LARGE - BLOCK)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A large file that has three blocks of data."""
    path = tmp_path / "source"
    with path.open("wb") as file:
        file.truncate(LARGE)
        for at in PARTS:
            file.seek(at)
            file.write(bytes([at % 251]) * BLOCK)
    return path


def came_back(path: Path) -> bool:
    with path.open("rb") as file:
        assert os.fstat(file.fileno()).st_size == LARGE
        found = []
        for at in PARTS:
            file.seek(at)
            found.append(file.read(BLOCK) == bytes([at % 251]) * BLOCK)
    return all(found)


def small(tmp_path: Path, data: bytes = b"core" * 1000) -> tuple[Path, SavedFile]:
    source, packed = tmp_path / "small", tmp_path / "packed"
    source.write_bytes(data)
    return packed, saved_file.write(source, packed)


def test_a_file_comes_back_with_its_holes(source: Path, tmp_path: Path) -> None:
    packed, back = tmp_path / "packed", tmp_path / "back"
    saved = saved_file.write(source, packed)
    assert saved.size == LARGE
    assert sum(end - begin for begin, end in saved.parts) < 10 << 20
    assert saved.stored == packed.stat().st_size < 1 << 20
    assert saved.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()
    saved_file.read(packed, back, saved)
    assert came_back(back)
    assert back.stat().st_blocks * 512 < 10 << 20
    assert {path.stat().st_mode & 0o777 for path in (packed, back)} == {0o600}


@pytest.mark.parametrize("data", [b"", b"x", bytes(BLOCK), os.urandom((4 << 20) + 1)])
def test_files_of_all_sizes_come_back(tmp_path: Path, data: bytes) -> None:
    packed, saved = small(tmp_path, data)
    saved_file.read(packed, tmp_path / "back", saved)
    assert (tmp_path / "back").read_bytes() == data


def test_a_file_that_is_one_hole_comes_back(tmp_path: Path) -> None:
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", LARGE)
    saved = saved_file.write(tmp_path / "hole", tmp_path / "packed")
    assert saved.parts == []
    saved_file.read(tmp_path / "packed", tmp_path / "back", saved)
    assert (tmp_path / "back").stat().st_size == LARGE
    assert (tmp_path / "back").stat().st_blocks == 0


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "harm",
    [
        flip,
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data + data,
        lambda data: b"no zstd at all" + data,
    ],
    ids=["a bit", "last byte", "half", "empty", "one more", "twice", "other"],
)
def test_a_file_that_was_changed_is_refused(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    packed, saved = small(tmp_path, os.urandom(100_000))
    packed.write_bytes(harm(packed.read_bytes()))
    with pytest.raises(StepFailed, match=r"packed is damaged: "):
        saved_file.read(packed, tmp_path / "back", saved)


def test_other_data_of_the_same_length_are_refused_with_both_digests(tmp_path: Path) -> None:
    packed, saved = small(tmp_path, b"a" * 1000)
    (tmp_path / "other").mkdir()
    other, its = small(tmp_path / "other", b"b" * 1000)
    packed.write_bytes(other.read_bytes())
    with pytest.raises(StepFailed) as refused:
        saved_file.read(packed, tmp_path / "back", saved)
    assert saved.sha256 in refused.value.message
    assert its.sha256 in refused.value.message


def test_no_more_is_written_than_was_signed(tmp_path: Path) -> None:
    """A frame of some hundred bytes may hold as many gigabytes."""
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    assert len(bomb) < 100_000
    packed = tmp_path / "packed"
    packed.write_bytes(bomb)
    saved = SavedFile(4096, [(0, 4096)], len(bomb), hashlib.sha256(bomb).hexdigest())
    saved_file.read(packed, tmp_path / "back", saved)
    assert (tmp_path / "back").stat().st_size == 4096


def test_data_that_end_early_are_refused(tmp_path: Path) -> None:
    packed, saved = small(tmp_path)
    more = msgspec.structs.replace(saved, size=saved.size + 1, parts=[(0, saved.size + 1)])
    with pytest.raises(StepFailed, match="its data end early"):
        saved_file.read(packed, tmp_path / "back", more)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    packed, saved = small(tmp_path)
    with pytest.raises(FileExistsError):
        saved_file.write(tmp_path / "small", packed)
    with pytest.raises(FileExistsError):
        saved_file.read(packed, tmp_path / "small", saved)
    assert (tmp_path / "small").read_bytes() == b"core" * 1000


def test_a_file_whose_data_cannot_be_found_is_not_saved_as_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come back as zeros, and its digest would be right."""

    def seek(file: int, at: int, how: int) -> int:
        raise OSError(errno.EIO, "the disk is ill")

    monkeypatch.setattr(os, "lseek", seek)
    with pytest.raises(OSError, match="the disk is ill"):
        small(tmp_path)
