# SPDX-License-Identifier: Apache-2.0
"""Directories that go along: what arrives is what was there, also while it changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from bind_mounts import bound
from hypothesis import given, settings
from hypothesis import strategies as st

from liveshift.criu_glue.files import entries, sparse, trees
from liveshift.criu_glue.files.sparing import Sparing
from liveshift.criu_glue.files.trees import Stamp, Tree
from liveshift.criu_glue.files.unpacking import Unpacker
from liveshift.errors import StepFailed

Seen = dict[str, Any]


class Near(int):
    """Nanoseconds as tar's floating point keeps them."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and abs(self - other) < 2000

    __hash__ = int.__hash__


def look(top: Path) -> Seen:
    """Everything below a directory that a move must keep."""
    found: Seen = {}
    twins: dict[int, str] = {}
    for name in sorted(os.fsencode(p.relative_to(top)) for p in top.rglob("*")):
        path = os.path.join(os.fsencode(top), name)
        s = os.lstat(path)
        about: list[object] = [stat.filemode(s.st_mode), s.st_uid, s.st_gid]
        if stat.S_ISREG(s.st_mode):
            with open(path, "rb") as file:
                about.append(hashlib.file_digest(file, "sha256").hexdigest())
            about.append(Near(s.st_mtime_ns))
            if s.st_nlink > 1:
                about.append(twins.setdefault(s.st_ino, os.fsdecode(name)))
        elif stat.S_ISLNK(s.st_mode):
            about.append(os.readlink(path))
        found[os.fsdecode(name)] = about
    return found


class Move:
    """Both passes over one directory, as departure and arrival make them."""

    def __init__(self, tmp_path: Path) -> None:
        self.here, self.there = tmp_path / "here", tmp_path / "there"
        self.here.mkdir()
        self.there.mkdir()
        self.tree = Tree("tmp", self.here)
        self.listed: dict[str, Stamp] = {}

    def send(self, names: list[str]) -> list[str]:
        unpacker = Unpacker(self.there)
        trees.pack(self.tree, names, unpacker.write)
        unpacker.finish()
        return unpacker.names

    def first(self) -> list[str]:
        self.listed = trees.listing(self.tree)
        return self.send(list(self.listed))

    def second(self, always: tuple[str, ...] = ()) -> list[str]:
        now = trees.listing(self.tree)
        sent = self.send(trees.changed(self.listed, now, always))
        trees.remove(self.there, [name for name in self.listed if name not in now])
        return sent


@pytest.fixture
def move(tmp_path: Path) -> Move:
    return Move(tmp_path)


def test_round_trip(move: Move) -> None:
    top = move.here
    (top / "empty").mkdir(mode=0o700)
    (top / "deep" / ("d" * 120) / ("e" * 200)).mkdir(parents=True)
    (top / "deep" / ("d" * 120) / ("e" * 200) / "f").write_bytes(b"far down")
    for name in ("with space", "ünïcode-☃", "new\nline", "-rf", "'quoted\"", ".hidden", "a" * 255):
        (top / name).write_bytes(name.encode())
    Path(os.fsdecode(os.fsencode(top) + b"/not-utf8-\xff\xfe")).write_bytes(b"x")
    (top / "large").write_bytes(os.urandom(5 << 20))
    (top / "none").touch()
    (top / "odd").write_bytes(b"z" * 511)
    (top / "mode").write_bytes(b"x")
    (top / "mode").chmod(0o6751)
    (top / "sticky").mkdir()
    (top / "sticky").chmod(0o1777)
    (top / "link").symlink_to("large")
    (top / "dangling").symlink_to("/nowhere/at all")
    (top / "to directory").symlink_to("deep")
    os.link(top / "large", top / "empty" / "hard link")
    os.mkfifo(top / "fifo", 0o640)
    os.utime(top / "odd", ns=(10**18, 1_234_567_890_123_450_000))
    if os.geteuid() == 0:
        os.chown(top / "odd", 1234, 4321)
        os.chown(top / "empty", 1234, 4321)
        os.lchown(top / "link", 1234, 4321)
    move.first()
    assert look(move.there) == look(move.here)


def test_a_second_pass_makes_it_exact(move: Move) -> None:
    top = move.here
    for name in ("same", "content", "touched back", "mode", "gone", "mapped", "renamed"):
        (top / name).write_bytes(b"first " + name.encode())
    (top / "directory gone" / "below").mkdir(parents=True)
    (top / "directory gone" / "below" / "file").touch()
    (top / "checkpoint-1").mkdir()
    (top / "latest").symlink_to("checkpoint-1")
    (top / "one").write_bytes(b"linked")
    move.first()

    times = (top / "touched back").stat()
    (top / "content").write_bytes(b"FIRST content")
    (top / "touched back").write_bytes(b"FIRST touched back")
    os.utime(top / "touched back", ns=(times.st_atime_ns, times.st_mtime_ns))
    (top / "mode").chmod(0o600)
    (top / "gone").unlink()
    (top / "renamed").rename(top / "after")
    shutil.rmtree(top / "directory gone")
    (top / "checkpoint-2").mkdir()
    (top / "checkpoint-2" / "model.pt").write_bytes(b"weights")
    (top / "latest").unlink()
    (top / "latest").symlink_to("checkpoint-2")
    os.link(top / "one", top / "two")
    sent = move.second(always=("mapped",))
    assert look(move.there) == look(move.here)
    assert "same" not in sent
    assert {"mapped", "content", "touched back", "mode", "after", "latest", "one", "two"} <= {*sent}


def test_a_file_that_is_always_sent_goes_with_all_its_names(move: Move) -> None:
    """The name by which it is mapped comes first, so that it has the content."""
    for name in ("a", "other"):
        (move.here / name).write_bytes(b"first")
    os.link(move.here / "a", move.here / "b")
    os.link(move.here / "a", move.here / "mapped")
    move.first()
    at = (move.here / "a").stat()
    (move.here / "mapped").write_bytes(b"SECON")
    os.utime(move.here / "a", ns=(at.st_atime_ns, at.st_mtime_ns))
    now = trees.listing(move.tree)  # as after a store that has changed no time
    move.listed = {name: now[name] for name in move.listed}
    sent = move.second(always=("mapped",))
    assert sent[0] == "mapped"
    assert set(sent) == {"a", "b", "mapped"}
    assert look(move.there) == look(move.here)


def _a_directory(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "x").write_bytes(b"1")


KINDS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "file": lambda path: path.write_bytes(b"in its place"),
    "directory": _a_directory,
    "link": lambda path: path.symlink_to("other"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "fifo": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_anything_may_take_the_place_of_anything(move: Move, before: str, after: str) -> None:
    other = move.here / "other"
    other.mkdir()
    (other / "x").write_bytes(b"of the other")
    thing = move.here / "thing"
    KINDS[before](thing)
    move.first()
    assert look(move.there) == look(move.here)
    if thing.is_dir() and not thing.is_symlink():
        shutil.rmtree(thing)
    else:
        thing.unlink(missing_ok=True)
    KINDS[after](thing)
    move.second()
    assert look(move.there) == look(move.here)


DEEDS = ["write", "link", "hard", "mkdir", "delete", "chmod", "empty"]
deeds = st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz"), st.sampled_from(DEEDS))


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(deeds, max_size=14), st.integers(0, 14))
def test_any_history_ends_alike(history: list[tuple[str, str, str]], at: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        move = Move(Path(directory))
        for n, (one, two, what) in enumerate(history):
            if n == at:
                move.first()
            path, other = move.here / one / two, move.here / two
            try:
                path.parent.mkdir(exist_ok=True)
                if what == "write":
                    path.write_bytes(os.urandom(n))
                elif what == "link":
                    path.symlink_to(f"../{two}")
                elif what == "hard":
                    other.touch()
                    os.link(other, path)
                elif what == "mkdir":
                    path.mkdir()
                elif what == "chmod":
                    path.chmod(0o700 | n)
                elif what == "delete":
                    path.unlink()
                else:
                    shutil.rmtree(path.parent)
            except OSError:
                continue
        move.second()
        assert look(move.there) == look(move.here)


def test_what_vanishes_or_changes_while_it_is_read_spoils_nothing(move: Move) -> None:
    top = move.here
    for name in ("gone", "shrinks", "grows", "stays", "becomes a socket"):
        (top / name).write_bytes(b"0123456789" * 100)
    (top / "directory").mkdir()
    (top / "directory" / "file").touch()
    move.listed = trees.listing(move.tree)
    (top / "gone").unlink()
    (top / "becomes a socket").unlink()
    shutil.rmtree(top / "directory")
    (top / "directory").write_bytes(b"a file now")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(top / "becomes a socket"))
        move.send(list(move.listed))
        (top / "shrinks").write_bytes(b"less")
        with (top / "grows").open("ab") as file:
            file.write(b"and more")
        move.second()
        (top / "becomes a socket").unlink()  # CRIU binds it again: it does not go as a file
    assert look(move.there) == look(move.here)


def test_nothing_is_read_through_a_link_that_has_taken_a_files_place(
    move: Move, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a job swaps while root packs must not show root's own files to it."""
    secret = tmp_path / "secret"
    secret.mkdir()
    for name in ("a", "b"):
        (secret / name).write_bytes(b"root's")
    (move.here / "directory").mkdir()
    for name in ("a", "directory/b", "c"):
        (move.here / name).write_bytes(b"job's ")
    really = entries.open_regular

    def swapped(parent: int, last: str) -> BinaryIO:
        if last in ("a", "b"):
            thing = move.here / {"a": "a", "b": "directory"}[last]
            thing.rename(tmp_path / f"was {thing.name}")
            thing.symlink_to(secret if thing.name == "directory" else secret / "a")
        return really(parent, last)

    monkeypatch.setattr(entries, "open_regular", swapped)
    move.first()
    came = {p.name: p.read_bytes() for p in move.there.rglob("*") if p.is_file()}
    assert came == {"c": b"job's ", "b": b"job's "}, "of the directory that was there"
    monkeypatch.undo()
    move.second()
    assert look(move.there) == look(move.here)


def test_a_file_that_shrinks_in_the_middle_is_padded(move: Move) -> None:
    size = 3 << 20
    (move.here / "shrinks").write_bytes(b"x" * size)
    unpacker = Unpacker(move.there)

    def write(data: bytes) -> None:
        if (move.here / "shrinks").stat().st_size == size:
            os.truncate(move.here / "shrinks", 1 << 20)
        unpacker.write(data)

    trees.pack(move.tree, [".", "shrinks"], write)
    unpacker.finish()
    came = (move.there / "shrinks").read_bytes()
    assert len(came) == size
    assert came.strip(b"x\0") == b""


def test_of_a_file_with_holes_its_data_is_sent(move: Move) -> None:
    """64 GB that take 3 MB: neither end reads, sends or writes the holes."""
    data = {0: b"first", 5 << 30: os.urandom(3 << 20), (64 << 30) - 4096: b"last" * 1024}
    with (move.here / "holes").open("wb") as file:
        for at, text in data.items():
            os.pwrite(file.fileno(), text, at)
    with (move.here / "nothing but a hole").open("wb") as file:
        file.truncate(64 << 30)
    with (move.here / "many").open("wb") as file:
        for at in range(0, 4 << 20, 8192):
            os.pwrite(file.fileno(), b"x" * 4096, at)
        file.truncate(64 << 20)
    move.listed = trees.listing(move.tree)
    sent: list[int] = []
    unpacker = Unpacker(move.there)

    def write(data: bytes) -> None:
        sent.append(len(data))
        unpacker.write(data)

    trees.pack(move.tree, list(move.listed), write, ["holes"])
    unpacker.finish()
    assert sum(sent) < 9 << 20
    for name in ("holes", "nothing but a hole", "many"):
        here, there = (move.here / name).stat(), (move.there / name).stat()
        assert (there.st_size, there.st_mode) == (here.st_size, here.st_mode)
        assert Near(there.st_mtime_ns) == here.st_mtime_ns
        assert there.st_blocks * 512 < 6 << 20
    with (move.there / "holes").open("rb") as copied:
        for at, text in data.items():
            assert os.pread(copied.fileno(), len(text), at) == text
        assert os.pread(copied.fileno(), 4096, 64 << 30) == b""
    assert (move.there / "many").read_bytes() == (move.here / "many").read_bytes()


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(0, 3 * 4096))
@settings(max_examples=60, deadline=None)
def test_holes_of_any_width_come_as_they_are(widths: list[int], end: int) -> None:
    """Narrow ones are sent as zeros, and then the file may be sent as if it had none. Databases
    make such files: they write pages in no order."""
    with tempfile.TemporaryDirectory() as directory:
        move = Move(Path(directory))
        at = 0
        with (move.here / "file").open("wb") as file:
            for width in widths:
                os.pwrite(file.fileno(), os.urandom(4096), at)
                at += (1 + width) * 4096
            os.pwrite(file.fileno(), os.urandom(end), at)
        move.first()
        assert (move.there / "file").read_bytes() == (move.here / "file").read_bytes()


def test_a_file_that_its_file_system_has_compressed_comes_whole(
    move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a file takes less space than its size, and has no hole."""
    monkeypatch.setattr(sparse, "has_holes", lambda file: True)
    for size in (1, 4096, (3 << 20) + 5):
        (move.here / f"compressed {size}").write_bytes(os.urandom(size))
    move.first()
    assert look(move.there) == look(move.here)


def test_holes_that_are_made_or_filled_while_a_file_is_read_spoil_nothing(move: Move) -> None:
    path = move.here / "changes"
    with path.open("wb") as file:
        for at in range(0, 32 << 20, 4 << 20):
            os.pwrite(file.fileno(), os.urandom(1 << 20), at)
        file.truncate(32 << 20)
    move.listed = trees.listing(move.tree)
    unpacker = Unpacker(move.there)
    writes = 0

    def write(data: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            os.truncate(path, 10 << 20)
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), b"y" * (3 << 20), 5 << 20)
        unpacker.write(data)

    trees.pack(move.tree, list(move.listed), write)
    unpacker.finish()
    assert (move.there / "changes").stat().st_size == 32 << 20
    move.second()
    assert look(move.there) == look(move.here)


def test_single_files_go_by_name(move: Move) -> None:
    (move.here / "var" / "log").mkdir(parents=True)
    (move.here / "var" / "log" / "train.log").write_bytes(b"line\n")
    (move.here / "var" / "log" / "other.log").write_bytes(b"not asked for\n")
    move.tree = Tree("open", move.here, ("var/log/train.log", "var/log/missing"))
    assert move.first() == ["var/log/train.log"]
    assert (move.there / "var" / "log" / "train.log").read_bytes() == b"line\n"
    assert not (move.there / "var" / "log" / "other.log").exists()


def test_a_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert trees.listing(Tree("carried:/x", tmp_path / "missing")) == {}


def test_a_listing_by_names_has_those_only() -> None:
    names = trees.listing(Tree("open", Path("/proc/self"), ("status",)))
    assert list(names) == ["status"]


@pytest.mark.root
def test_what_is_mounted_below_is_left_out_be_it_of_the_same_file_system(move: Move) -> None:
    """A bind mount does not change the device number."""
    elsewhere = move.here.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "library.so").write_bytes(b"another's")
    (move.here / "own").write_bytes(b"x")
    with bound(elsewhere, move.here / "tree"), bound(elsewhere / "library.so", move.here / "file"):
        assert os.lstat(move.here / "tree").st_dev == os.lstat(move.here).st_dev
        assert sorted(move.first()) == [".", "own"]
    with bound(elsewhere, move.here / "tree"):
        below = trees.listing(Tree("carried", move.here / "tree"))
        assert set(below) == {".", "library.so"}, "a mount that is listed itself goes"


@pytest.mark.root
def test_nothing_is_put_or_removed_on_what_is_mounted_at_the_destination(move: Move) -> None:
    elsewhere = move.here.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "library.so").write_bytes(b"another's")
    (move.here / "tree").mkdir()
    (move.here / "tree" / "library.so").write_bytes(b"moved")
    (move.here / "file").write_bytes(b"in a directory's place")
    with bound(elsewhere, move.there / "tree"):
        with pytest.raises(StepFailed, match=r"tree.* would lie on a mount below its directory"):
            move.send([".", "tree", "tree/library.so"])
        trees.remove(move.there, ["tree/library.so", "tree"])
    with bound(elsewhere, move.there / "file" / "deep"):
        with pytest.raises(StepFailed, match=r"file.* would lie on a mount below its directory"):
            move.send(["file"])
        assert (move.there / "file" / "deep" / "library.so").exists()
    assert (elsewhere / "library.so").read_bytes() == b"another's"


def test_unpacking_where_nothing_can_be_put_says_so(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_bytes(os.urandom(1 << 20))
    (tmp_path / "there").write_bytes(b"a file where a directory is needed")
    tree = Tree("tmp", tmp_path / "here")
    unpacker = Unpacker(tmp_path / "there")

    def send() -> None:
        trees.pack(tree, ["file"], unpacker.write)
        unpacker.finish()

    with pytest.raises(OSError, match="there"):
        send()


def test_a_shared_directory_keeps_what_is_as_new_as_what_comes(tmp_path: Path) -> None:
    """Another capsule may have such a file open: replacing it would cut its writer off."""
    here, there = tmp_path / "here", tmp_path / "there"
    for top, text in ((here, "moved"), (there, "live")):
        top.mkdir()
        for name in ("newer there", "same age", "same age, mapped", "newer here"):
            (top / name).write_text(text)
            os.utime(top / name, ns=(0, 10**18 + 123_456_789))
    os.utime(there / "newer there", ns=(0, 10**18 + 10**9))
    os.utime(here / "newer here", ns=(0, 10**18 + 10**9))
    tree = Tree("carried", here)
    sent: list[bytes] = []
    trees.pack(tree, trees.listing(tree), lambda b: sent.append(bytes(b)), ["same age, mapped"])
    unpacker = Unpacker(there, Sparing())
    unpacker.write(b"".join(sent))
    unpacker.finish()
    found = {p.name: p.read_text() for p in there.iterdir()}
    assert found == {
        "newer there": "live",
        "same age": "live",
        "same age, mapped": "moved",
        "newer here": "moved",
    }
    assert set(unpacker.written) == {"same age, mapped", "newer here"}
