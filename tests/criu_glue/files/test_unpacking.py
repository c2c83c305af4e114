# SPDX-License-Identifier: Apache-2.0
"""Tar streams that another host's root has made up: what they can't do here."""

from __future__ import annotations

import io
import os
import stat
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from liveshift.criu_glue.files import below, rights, sparse, trees
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.files.sparing import Sparing
from liveshift.criu_glue.files.unpacking import HEADER_LIMIT, Unpacker
from liveshift.errors import StepFailed

ALICE = User(64001, 64001, (64002,))
BOB = 64101

Entry = tuple[str, bytes, dict[str, object]]


def entry(name: str, kind: bytes = tarfile.REGTYPE, **more: object) -> Entry:
    return name, kind, more


def tar(*entries: Entry) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(mode="w", fileobj=raw, format=tarfile.PAX_FORMAT) as archive:
        for name, kind, more in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.mtime = 10**9
            content = more.pop("content", b"")
            assert isinstance(content, bytes)
            info.size = len(content)
            for key, value in more.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def unpack(raw: bytes, top: Path, **options: object) -> Unpacker:
    unpacker = Unpacker(top, **options)  # type: ignore[arg-type]
    try:
        unpacker.write(raw)
    finally:
        unpacker.finish()
    return unpacker


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    """A directory whose surroundings must stay as they are."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"kept")
    (tmp_path / "top").mkdir()
    before = {str(p): os.lstat(p) for p in tmp_path.glob("outside/**/*")}
    before[str(tmp_path / "outside")] = os.lstat(tmp_path / "outside")
    yield tmp_path / "top"
    for name, was in before.items():
        now = os.lstat(name)
        assert (now.st_mode, now.st_uid, now.st_mtime_ns, now.st_nlink) == (
            was.st_mode,
            was.st_uid,
            was.st_mtime_ns,
            was.st_nlink,
        )
    assert {p.name for p in tmp_path.iterdir()} == {"outside", "top"}


@pytest.mark.parametrize(
    "name",
    ["/etc/x", "../x", "a/../../x", "..", "a//b", "./a", "a/./b", "a" * 300, "b/" * 2100 + "c"],
)
def test_names_that_lead_elsewhere(top: Path, name: str) -> None:
    with pytest.raises(StepFailed, match="leads out of its directory or is no valid path"):
        unpack(tar(entry(name, content=b"x")), top)
    assert list(top.iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_nothing_is_put_through_a_link_of_its_own(top: Path, kind: bytes) -> None:
    """While the job runs it may put a link there, and what is behind the link is left out. Once the
    job is frozen, a file would be missing for good."""
    raw = tar(
        entry("a", tarfile.SYMTYPE, linkname="../outside"),
        entry("a/file", kind),
        entry("a/b/c", kind),
    )
    unpack(raw, top, running=True)
    assert [p.name for p in top.iterdir()] == ["a"]
    with pytest.raises(StepFailed, match="a/file cannot be put on this host: a link, or a file"):
        unpack(raw, top)
    assert [p.name for p in top.iterdir()] == ["a"]


def test_a_link_in_a_files_place_is_replaced_and_not_written_through(top: Path) -> None:
    link = entry("a", tarfile.SYMTYPE, linkname="../outside/file")
    unpack(tar(link, entry("a", content=b"x")), top)
    assert (top / "a").read_bytes() == b"x"
    unpack(tar(link, entry("a", tarfile.DIRTYPE, mode=0o777)), top)
    assert (top / "a").is_dir()


@pytest.mark.parametrize("target", ["../outside/file", "/etc/passwd", "there", "a", "no"])
def test_hard_links_lead_to_what_came_only(top: Path, target: str) -> None:
    (top / "there").write_bytes(b"another's")
    raw = tar(entry("a", tarfile.LNKTYPE, linkname=target, mode=0o4777, uid=64001))
    if target.startswith((".", "/")):
        with pytest.raises(StepFailed, match="leads out of its directory"):
            unpack(raw, top)
    else:
        unpack(raw, top)  # left out: such a file may have vanished while it was read
    assert [p.name for p in top.iterdir()] == ["there"]
    assert stat.S_IMODE((top / "there").stat().st_mode) == 0o644
    unpack(tar(entry("b"), entry("a", tarfile.LNKTYPE, linkname="b", mode=0o4777)), top)
    assert (top / "a").samefile(top / "b")
    assert stat.S_IMODE((top / "b").stat().st_mode) == 0o644


def test_the_directory_itself_stays_one(top: Path) -> None:
    with pytest.raises(StepFailed, match="the directory itself is not a directory"):
        unpack(tar(entry(".", content=b"x")), top)
    assert top.is_dir()


def header(**fields: tuple[int, bytes]) -> bytes:
    """One header block as tarfile would not write it."""
    info = tarfile.TarInfo("x")
    raw = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    for offset, value in fields.values():
        raw[offset : offset + len(value)] = value
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


SIZE, TYPE, UID, MTIME = 124, 156, 108, 136
NEGATIVE = b"\xff" * 12
END = bytes(1024)


def one_file() -> bytes:
    """An entry with no end mark behind it."""
    return tar(entry("a"))[:512]


@pytest.mark.parametrize(
    "raw",
    [
        header(size=(SIZE, NEGATIVE)),
        header(size=(SIZE, b"77777777777\0")),
        header(uid=(UID, b"\xff" * 8)),
        header(mtime=(MTIME, b"\x80" + b"\xff" * 11)),
        header(type=(TYPE, b"S")),  # sparse
        header(type=(TYPE, b"L"), size=(SIZE, b"77777777777\0")),  # a long name of 8 GiB
        header(type=(TYPE, b"g")),
        header(type=(TYPE, b"x"), size=(SIZE, b"77777777777\0")),
        header(type=(TYPE, b"x"), size=(SIZE, NEGATIVE)),
        header(type=(TYPE, b"x"), size=(SIZE, b"00000000000\0")) * 3000,
        tar(entry("a", pax_headers={"size": "-1"})),
        tar(entry("a", pax_headers={"mtime": "nan"})),
        tar(entry("a", pax_headers={"mtime": "1e400"})),
        tar(entry("a", pax_headers={"uid": "-1"})),
        tar(entry("a", pax_headers={"uid": "4294967295"})),
        tar(entry("a", pax_headers={"gid": "9" * 30})),
        tar(entry("a", pax_headers={"path": "../x"})),
        tar(entry("a", pax_headers={"path": "x\0y"})),
        tar(entry("a", pax_headers={"GNU.sparse.map": "0,1"})),
        tar(entry("a", pax_headers={"comment": "x" * (HEADER_LIMIT + 1)})),
        b"x" * 1024,
        struct.pack("<I", 7),
        one_file() + b"x" * 512 + END,
        one_file() + header(type=(TYPE, b"x"), size=(SIZE, b"00000000000\0")) + END,
        one_file() + header(size=(SIZE, NEGATIVE)) + END,
        one_file()[:512],
        one_file(),
        one_file() + one_file()[:100],
    ],
)
def test_damaged_and_made_up_streams_are_said_to_be_so(top: Path, raw: bytes) -> None:
    with pytest.raises(StepFailed, match="the stream of files is damaged"):
        unpack(raw, top)
    assert all(p.stat().st_size == 0 for p in top.iterdir())


def holes(size: object, *extents: tuple[int, int], data: bytes = b"") -> bytes:
    """A stream with one file with holes; ``extents``: offset and length, as they are said to be."""
    content = b"".join(struct.pack("<QQ", at, length) + b"x" * length for at, length in extents)
    return tar(entry("a", content=content + data, pax_headers={sparse.HEADER: str(size)}))


@pytest.mark.parametrize(
    "raw",
    [
        holes(-1),
        holes(1 << 63),
        holes("a lot"),
        holes("9" * 5000),
        holes(100, (99, 2)),
        holes(100, (10, 5), (14, 5)),
        holes(100, (10, 5), (2, 5)),
        holes(100, (10, 0)),
        holes(100, data=b"half"),
        holes(100, data=struct.pack("<QQ", 0, 90)),
        holes(100, data=struct.pack("<QQ", 1 << 63, 1 << 63) + b"x"),
        holes(1 << 62, data=struct.pack("<QQ", 5, (1 << 64) - 5) + b"x" * 50),
    ],
)
def test_extents_that_no_file_has(top: Path, raw: bytes) -> None:
    with pytest.raises(StepFailed, match="the stream of files is damaged"):
        unpack(raw, top)
    assert sum(p.stat().st_size for p in top.iterdir()) <= 100


def test_extents_are_written_where_they_say(top: Path) -> None:
    unpack(holes(1 << 40, (5, 3), (8, 2), (1 << 39, 1)), top)
    assert (top / "a").stat().st_size == 1 << 40
    with (top / "a").open("rb") as file:
        assert file.read(12) == b"\0" * 5 + b"x" * 5 + b"\0" * 2
        assert os.pread(file.fileno(), 3, (1 << 39) - 1) == b"\0x\0"


@pytest.mark.root
@pytest.mark.parametrize("sparing", [False, True])
def test_a_users_tree_brings_no_right_of_anothers(top: Path, sparing: bool) -> None:
    options = {"sparing": Sparing() if sparing else None, "user": ALICE}
    for words, bad in {
        "a device": entry("x", tarfile.CHRTYPE, devmajor=1, devminor=3),
        "a device,": entry("x", tarfile.BLKTYPE, devmajor=8, devminor=0, uid=ALICE.uid),
        "runs as user 0": entry("x", mode=0o4755),
        "runs as group 0": entry("x", mode=0o2755, uid=ALICE.uid),
        f"runs as user {BOB}": entry("x", mode=0o4755, uid=BOB, gid=ALICE.gid),
    }.items():
        with pytest.raises(StepFailed, match=f"{words}.* a capsule of user 64001 cannot bring"):
            unpack(tar(bad), top, **options)
        assert list(top.iterdir()) == []
    mine: dict[str, Any] = {"uid": ALICE.uid, "gid": ALICE.groups[0]}
    came = tar(
        entry("mine", mode=0o6755, **mine),
        entry("others", mode=0o600, uid=BOB, gid=BOB, content=b"kept as it was"),
        entry("roots", mode=0o644),
        entry("pipe", tarfile.FIFOTYPE, mode=0o640, **mine),
        entry("absolute", tarfile.SYMTYPE, linkname="/data/x", **mine),
    )
    unpack(came, top, **options)
    seen = {p.name: (os.lstat(p).st_uid, stat.S_IMODE(os.lstat(p).st_mode)) for p in top.iterdir()}
    assert seen == {
        "mine": (ALICE.uid, 0o6755),
        "others": (BOB, 0o600),
        "roots": (0, 0o644),
        "pipe": (ALICE.uid, 0o640),
        "absolute": (ALICE.uid, 0o777),
    }


@pytest.mark.root
def test_roots_tree_brings_rights_and_no_device(top: Path) -> None:
    unpack(tar(entry("x", mode=0o4755)), top, user=User(0, 0))
    assert stat.S_IMODE((top / "x").stat().st_mode) == 0o4755
    with pytest.raises(StepFailed, match="y is a device"):
        unpack(tar(entry("y", tarfile.BLKTYPE, devmajor=8)), top, user=User(0, 0))


@pytest.mark.root
def test_others_directories_keep_their_owners_and_modes(top: Path) -> None:
    (top / "shared").mkdir(mode=0o755)
    mine: dict[str, Any] = {"uid": ALICE.uid, "gid": ALICE.gid, "mode": 0o777}
    raw = tar(entry(".", tarfile.DIRTYPE, **mine), entry("shared", tarfile.DIRTYPE, **mine))
    assert unpack(raw, top, sparing=Sparing(), user=ALICE).written == []
    for path in (top, top / "shared"):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o755)


class Single:
    """Single files below a directory that others' files are in too."""

    def __init__(self, top: Path) -> None:
        self.top = top
        for directory in [*top.parents][:-1]:  # pytest's are its own user's only
            self._let_in(directory)
        os.chmod(top, 0o755)

    @staticmethod
    def _let_in(directory: Path) -> None:
        os.chmod(directory, directory.stat().st_mode | 0o111)

    def make(self, name: str, uid: int, mode: int, content: bytes | None = b"old") -> Path:
        path = self.top / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        os.chown(path, uid, uid)
        path.chmod(mode)
        return path

    def send(self, name: str, **more: object) -> None:
        own: dict[str, Any] = {
            "uid": ALICE.uid,
            "gid": ALICE.gid,
            "mode": 0o600,
            "content": b"new",
            **more,
        }
        unpack(tar(entry(name, **own)), self.top, user=ALICE, single=True)


@pytest.mark.root
def test_single_files_are_written_with_the_users_own_rights(top: Path) -> None:
    single = Single(top)
    home = single.make("home", ALICE.uid, 0o700, None)
    single.send("home/log")
    single.send("home/runs/7/log")  # with the directories that it needs
    for path in (home / "log", home / "runs", home / "runs/7", home / "runs/7/log"):
        assert path.stat().st_uid == ALICE.uid
    single.send("home/log", content=b"newer")
    assert (home / "log").read_bytes() == b"newer"
    mine = single.make("mine, in root's directory", ALICE.uid, 0o600)
    single.send(mine.name)
    ours = single.make("the group's", 0, 0o660)
    os.chown(ours, BOB, ALICE.groups[0])
    single.send(ours.name)
    for path in (mine, ours):
        assert path.read_bytes() == b"new"
    assert ours.stat().st_uid == BOB


@pytest.mark.root
def test_single_files_that_the_user_may_not_write_are_refused(top: Path) -> None:
    single = Single(top)
    single.make("shadow", 0, 0o644)
    single.make("bobs", BOB, 0o755, None)
    single.make("bobs/key", BOB, 0o600)
    (top / "link").symlink_to("shadow")
    for name in ("shadow", "bobs/key", "bobs/new", "new", "new/file", "link"):
        with pytest.raises(StepFailed, match="user 64001 may not write the open file"):
            single.send(name)
    assert (top / "shadow").read_bytes() == b"old"
    assert (top / "bobs/key").read_bytes() == b"old"
    assert {p.name for p in top.iterdir()} == {"shadow", "bobs", "link"}
    home = single.make("home", ALICE.uid, 0o700, None)
    (home / "up").symlink_to("..")
    with pytest.raises(StepFailed, match="home/up/shadow cannot be put on this host: a link"):
        single.send("home/up/shadow")
    assert (top / "shadow").read_bytes() == b"old"
    raw = tar(entry("home/x", tarfile.SYMTYPE, linkname="/etc/shadow"))
    with pytest.raises(StepFailed, match="was sent as a single file but is not a regular file"):
        unpack(raw, top, user=ALICE, single=True)


@pytest.mark.root
def test_the_rest_of_the_process_keeps_its_rights(top: Path) -> None:
    before = os.getgroups()
    Single(top)
    (top / "secret").write_bytes(b"root's")
    (top / "secret").chmod(0o600)

    def read() -> bytes:
        assert (top / "secret").parent.is_dir()
        return (top / "secret").read_bytes()

    with pytest.raises(PermissionError):
        rights.acting_as(ALICE, read)
    assert rights.acting_as(User(0, 0), read) == b"root's"
    assert read() == b"root's"
    assert os.getgroups() == before


def test_removal_stays_below_and_behind_no_link(top: Path) -> None:
    outside = top.parent / "outside"
    (top / "link").symlink_to(outside)
    (top / "directory").mkdir()
    (top / "directory" / "file").touch()
    (top / "kept").touch()
    names = ["../outside/file", str(outside / "file"), "link/file", ".", "..", "", "x\0"]
    trees.remove(top, [*names, "directory", "directory/file", "nothing"])
    assert {p.name for p in top.iterdir()} == {"link", "kept"}
    assert (outside / "file").exists()


def test_reaching_below(top: Path) -> None:
    (top / "a").mkdir()
    (top / "a" / "up").symlink_to("..")
    with below.opened(top) as fd:
        for name in ("../outside/file", "/etc/passwd", "a/up/a"):
            with pytest.raises(OSError, match=r".+"):
                below.open_below(fd, name, os.O_RDONLY)
        os.close(below.open_below(fd, "a", os.O_RDONLY))
        with pytest.raises(NotADirectoryError), below.parent_of(fd, "a/up/b"):
            pass
        with pytest.raises(FileNotFoundError), below.parent_of(fd, "no/b"):
            pass
        inside = below.open_in_root(fd, "/a/up/../../../a", os.O_PATH)
        assert os.fstat(inside).st_ino == (top / "a").stat().st_ino
        os.close(inside)
