# SPDX-License-Identifier: Apache-2.0
"""The entries of a stream: what tarfile would make, but no names of owners, and nothing of what the
job puts in a file's place."""

from __future__ import annotations

import grp
import io
import os
import pwd
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from descriptors import no_descriptor_left

from liveshift.criu_glue.files import entries, trees
from liveshift.criu_glue.files.trees import Tree


def packed(top: Path, names: list[str], forced: tuple[str, ...] = ()) -> list[tarfile.TarInfo]:
    sent: list[bytes] = []
    trees.pack(Tree("tmp", top), names, sent.append, forced)
    with tarfile.open(fileobj=io.BytesIO(b"".join(sent))) as tar:
        return tar.getmembers()


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A directory with everything that can be moved."""
    top = tmp_path / "top"
    (top / "sub" / ("d" * 200)).mkdir(parents=True)
    (top / "sub" / ("d" * 200) / "ünï-☃").write_bytes(b"x" * 700)
    Path(os.fsdecode(os.fsencode(top) + b"/not-utf8-\xff")).write_bytes(b"x")
    (top / "set-user-id").write_bytes(b"x")
    (top / "set-user-id").chmod(0o6751)
    (top / "old").touch()
    os.utime(top / "old", ns=(0, -1_234_567_891))
    (top / "link").symlink_to("l" * 300)
    os.link(top / "old", top / "zz")
    os.link(top / "old", top / "sub" / "zz")
    os.mkfifo(top / "fifo", 0o640)
    if os.geteuid() == 0:
        os.chown(top / "old", 3_000_000, 4_000_000)
        os.mknod(top / "device", 0o20600, os.makedev(1, 300))
    return top


def test_entries_are_those_of_tarfile_but_for_the_names_of_owners(top: Path) -> None:
    names = list(trees.listing(Tree("tmp", top)))
    there = io.BytesIO()
    with tarfile.open(mode="w", fileobj=there) as tar:
        for name in names:
            info = tar.gettarinfo(top / name, arcname=name)
            info.uname = info.gname = ""
            with open(top / name, "rb") if info.isreg() else io.BytesIO() as content:
                tar.addfile(info, content)
    sent: list[bytes] = []
    trees.pack(Tree("tmp", top), names, sent.append)
    assert b"".join(sent) == there.getvalue()


def test_nobody_is_asked_for_the_names_of_owners(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of names may not answer, and the job is frozen meanwhile."""
    asked: list[int] = []
    monkeypatch.setattr(pwd, "getpwuid", asked.append)
    monkeypatch.setattr(grp, "getgrgid", asked.append)
    found = packed(top, [".", "old", "link"], ("old",))
    assert [(each.uname, each.gname) for each in found] == [("", "")] * 3
    assert asked == []


def test_what_is_sent_comes_in_blocks(tmp_path: Path) -> None:
    sizes = {"a": 3 << 20, "b": 100, "c": (1 << 20) - 1, "d": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    sent: list[bytes] = []
    trees.pack(Tree("tmp", tmp_path), sizes, sent.append)
    assert {len(data) for data in sent[:-1]} == {trees.BLOCK}
    with tarfile.open(fileobj=io.BytesIO(b"".join(sent))) as tar:
        for name in sizes:
            content = tar.extractfile(name)
            assert content is not None
            assert content.read() == (tmp_path / name).read_bytes()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "directory": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "fifo": lambda path: os.mkfifo(path),
    "socket": _socket,
}


@pytest.mark.parametrize("now", KINDS)
def test_a_file_that_becomes_something_else_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: str
) -> None:
    """Between lstat and open, which raise no error of the system for it, and leave nothing open."""
    for name in ("before", "file", "rest"):
        (tmp_path / name).write_bytes(b"x")
    _between(monkeypatch, tmp_path / "file", KINDS[now])
    with no_descriptor_left():
        found = packed(tmp_path, ["before", "file", "rest"])
    assert [each.name for each in found] == ["before", "rest"]


def test_a_link_that_becomes_a_file_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "rest").touch()
    _between(monkeypatch, tmp_path / "link", lambda path: path.write_bytes(b"x"))
    assert [each.name for each in packed(tmp_path, ["link", "rest"])] == ["rest"]


def _between(
    monkeypatch: pytest.MonkeyPatch, path: Path, replaced: Callable[[Path], object]
) -> None:
    """Replace a file as soon as it has been looked at."""
    look_at = os.lstat

    def looked(at: str | Path, *, dir_fd: int | None = None) -> os.stat_result:
        seen = look_at(at, dir_fd=dir_fd)
        if Path(at).name == path.name:
            monkeypatch.setattr(os, "lstat", look_at)
            path.unlink()
            replaced(path)
        return seen

    monkeypatch.setattr(os, "lstat", looked)


def test_nothing_behind_a_link_in_a_directorys_place_is_sent(tmp_path: Path) -> None:
    top, secret = tmp_path / "job's", tmp_path / "root's"
    for each in (top / "d", secret):
        (each / "customer").mkdir(parents=True)
        (each / "link").symlink_to("target")
    names = list(trees.listing(Tree("tmp", top)))
    assert {"d/customer", "d/link"} <= {*names}
    (top / "d").rename(tmp_path / "was d")
    (top / "d").symlink_to(secret)
    assert [each.name for each in packed(top, names)] == [".", "d"]


def test_a_further_name_is_no_link_to_a_name_that_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    os.link(tmp_path / "a", tmp_path / "b")
    os.link(tmp_path / "a", tmp_path / "c")
    really = entries.open_regular

    def gone(parent: int, last: str) -> object:
        (tmp_path / "a").unlink(missing_ok=True)
        return really(parent, last)

    monkeypatch.setattr(entries, "open_regular", gone)
    found = packed(tmp_path, ["a", "b", "c"])
    assert [(each.name, each.type, each.linkname) for each in found] == [
        ("b", tarfile.REGTYPE, ""),
        ("c", tarfile.LNKTYPE, "b"),
    ]
