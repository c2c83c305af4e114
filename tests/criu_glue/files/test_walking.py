# SPDX-License-Identifier: Apache-2.0
"""What is found below a directory while a job swaps the files there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from liveshift.criu_glue.files import below, trees, walking
from liveshift.criu_glue.files.trees import Tree
from liveshift.errors import StepFailed


@pytest.fixture
def tops(tmp_path: Path) -> tuple[Path, Path]:
    """A directory of the job's, and one that it may not read."""
    top, secret = tmp_path / "job's", tmp_path / "root's"
    for each in (top / "d", secret / "customers"):
        each.mkdir(parents=True)
        (each / "file").touch()
    return top, secret


def test_a_walk_follows_no_link_that_takes_a_directorys_place_meanwhile(
    tops: tuple[Path, Path],
) -> None:
    top, secret = tops
    found = []
    for name, _ in walking.walk(top):
        found.append(name)
        if name == "d":
            (top / "d").rename(top.parent / "was d")
            (top / "d").symlink_to(secret)
    assert found == [".", "d"]


def test_single_files_are_not_looked_at_through_a_link(tops: tuple[Path, Path]) -> None:
    top, secret = tops
    (top / "link").symlink_to(secret / "customers")
    assert list(trees.listing(Tree("open", top, ("link/file", "d/file")))) == ["d/file"]


def test_a_directory_that_vanishes_is_empty(tops: tuple[Path, Path]) -> None:
    top, _ = tops
    found = []
    for name, _ in walking.walk(top):
        found.append(name)
        if name == "d":
            (top / "d" / "file").unlink()
            (top / "d").rmdir()
    assert found == [".", "d"]


def test_a_directory_that_cannot_be_read_now_does_not_pass_for_an_empty_one(
    tops: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second pass would have its files removed at the destination."""
    top, _ = tops
    listdir, fails = os.listdir, iter([False, True])

    def failing(of: int | Path) -> list[str]:
        if next(fails):
            raise OSError(errno.EMFILE, "too many open files")
        return listdir(of)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(OSError, match="too many open files"):
        list(walking.walk(top))


def test_a_directory_that_even_root_may_not_read_is_named(
    tops: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may take root for nobody."""
    top, _ = tops
    real = below.open_below

    def refusing(at: int, name: str, flags: int, one_mount: bool = False) -> int:
        if name == "d":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(at, name, flags, one_mount)

    monkeypatch.setattr(below, "open_below", refusing)
    with pytest.raises(StepFailed, match=r"even root may not read the directory .*/d., so"):
        list(walking.walk(top))


def test_a_path_that_is_too_long_to_move_is_named(tmp_path: Path) -> None:
    """A job may make one: mkdirat(2) limits the length of its argument, not that of the path."""
    half = "/".join(["d" * 200] * 10)
    (tmp_path / half).mkdir(parents=True)
    down = [os.open(tmp_path / half, os.O_PATH)]
    for _ in range(10):
        os.mkdir("d" * 200, dir_fd=down[-1])
        down.append(os.open("d" * 200, os.O_PATH, dir_fd=down[-1]))
    assert len(list(walking.walk(tmp_path))) == 21
    os.mkdir("e" * 200, dir_fd=down[-1])
    with pytest.raises(StepFailed, match=r"has 4220 bytes.* moved has 4095: .*'ddd") as caught:
        list(walking.walk(tmp_path))
    assert caught.value.hint == "remove it, or rename one of its directories"
    os.rename("d" * 200, tmp_path / "cut here", src_dir_fd=down[0])  # so that it can be removed
    for fd in down:
        os.close(fd)
