# SPDX-License-Identifier: Apache-2.0
"""Which files of a directory that others use go back with a capsule, and which stay."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from pathlib import Path

import pytest

from liveshift.criu_glue.files import trees
from liveshift.criu_glue.files.putting_back import BringingAlong, PuttingBack, check, touch
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.files.sparing import Sparing
from liveshift.criu_glue.files.trees import Tree
from liveshift.criu_glue.files.unpacking import Unpacker
from liveshift.errors import StepFailed

ALICE, BOB = User(64001, 64001), 64101
MINE = User(os.getuid(), os.getgid())
THEN, LATER = 10**9, 2 * 10**9


class Scratch:
    """``image``: how the directory was at the snapshot. ``top``: how it is now."""

    def __init__(self, place: Path, user: User) -> None:
        self.user = user
        self.image, self.top = place / "image", place / "top"
        for path in (self.image, self.top):
            path.mkdir()
            os.chown(path, user.uid, user.gid)

    def put(self, top: Path, name: str, text: str, when: int, uid: int | None = None) -> Path:
        path = top / name
        for folder in reversed(path.relative_to(top).parents[:-1]):
            if not (top / folder).exists():
                (top / folder).mkdir()
                os.chown(top / folder, self.user.uid, self.user.gid)
        path.write_text(text)
        os.chown(path, self.user.uid if uid is None else uid, self.user.gid)
        os.utime(path, (when, when))
        return path

    def then(self, name: str, text: str = "then", uid: int | None = None) -> Path:
        return self.put(self.image, name, text, THEN, uid)

    def now(self, name: str, text: str = "later", uid: int | None = None) -> Path:
        return self.put(self.top, name, text, LATER, uid)

    def back(
        self, *written: str, reads: tuple[str, ...] = (), forced: tuple[str, ...] = ()
    ) -> list[str]:
        """Put all of the image back where the capsule was; return what was written. ``written``,
        ``reads``: the files that it had open."""
        opened = {*written, *reads}
        return self._unpack(PuttingBack(self.top, self.user, opened, {*written}), forced)

    def along(self, *written: str) -> list[str]:
        """Bring all of the image along to another host."""
        unpacker = BringingAlong(self.top, Sparing(), self.user, {*written}, running=False)
        names = self._unpack(unpacker)
        check(self.top, unpacker.expected)
        return names

    def _unpack(self, unpacker: Unpacker, forced: tuple[str, ...] = ()) -> list[str]:
        tree = Tree("x", self.image)
        try:
            trees.pack(tree, trees.listing(tree), unpacker.write, forced)
        finally:
            unpacker.finish()
        return unpacker.written

    def found(self) -> dict[str, str]:
        files = (path for path in self.top.rglob("*") if path.is_file())
        return {str(path.relative_to(self.top)): path.read_text() for path in files}


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path, MINE)


def test_what_was_open_is_as_it_was_and_the_rest_stays(scratch: Scratch) -> None:
    for name in ("log", "runs/log", "notes", "data", "gone", "lost/log", "lost/data"):
        scratch.then(name)
    for name in ("log", "runs/log", "notes", "data", "new"):
        scratch.now(name)
    written = scratch.back("log", "runs/log", "lost/log", reads=("data", "lost/data"))
    assert scratch.found() == {
        "log": "then",
        "runs/log": "then",
        "lost/log": "then",
        "lost/data": "then",  # CRIU needs it
        "data": "later",  # the capsule only read it, so another job may have written it
        "notes": "later",
        "new": "later",
    }
    assert sorted(written) == ["log", "lost", "lost/data", "lost/log", "runs/log"]
    assert (scratch.top / "log").stat().st_mtime == THEN


def test_a_file_that_was_written_through_a_mapping_only_goes_back(scratch: Scratch) -> None:
    """CRIU's image does not say that the capsule could write it, but its entry does."""
    scratch.then("weights")
    scratch.now("weights")
    assert scratch.back(reads=("weights",), forced=("weights",)) == ["weights"]
    assert scratch.found() == {"weights": "then"}


def test_open_directories_and_those_of_open_files_are_made_again(scratch: Scratch) -> None:
    scratch.then("runs/7/log")
    (scratch.image / "cwd").mkdir()
    (scratch.image / "not open").mkdir()
    for name, mode in (("runs", 0o750), ("runs/7", 0o700), ("cwd", 0o711)):
        (scratch.image / name).chmod(mode)
    scratch.back("runs/7/log", reads=("cwd",))
    modes = {
        str(path.relative_to(scratch.top)): path.stat().st_mode & 0o777
        for path in scratch.top.rglob("*")
        if path.is_dir()
    }
    assert modes == {"runs": 0o750, "runs/7": 0o700, "cwd": 0o711}
    (scratch.top / "cwd").chmod(0o700)
    assert scratch.back("runs/7/log", reads=("cwd",)) == [], "those that are there stay"
    assert (scratch.top / "cwd").stat().st_mode & 0o777 == 0o700


def test_a_named_pipe_stays(scratch: Scratch) -> None:
    for top, when in ((scratch.image, THEN), (scratch.top, LATER)):
        os.mkfifo(top / "pipe")
        os.utime(top / "pipe", (when, when))
    assert scratch.back("pipe") == []


def test_a_file_that_has_not_changed_is_left_alone(scratch: Scratch) -> None:
    same = scratch.then("log"), scratch.put(scratch.top, "log", "same", THEN)
    assert [path.stat().st_size for path in same] == [4, 4]
    assert scratch.back("log") == []
    assert scratch.back("log", forced=("log",)) == ["log"], "it was written through a mapping"
    assert scratch.found() == {"log": "then"}


def test_rights_go_back_too(scratch: Scratch) -> None:
    scratch.then("log").chmod(0o640)
    scratch.put(scratch.top, "log", "then", THEN).chmod(0o600)
    scratch.back("log")
    assert (scratch.top / "log").stat().st_mode & 0o777 == 0o640


def test_a_shorter_file_and_one_with_holes_go_back(scratch: Scratch) -> None:
    with scratch.then("holes").open("r+") as file:
        file.truncate(1 << 20)
    os.utime(scratch.image / "holes", (THEN, THEN))
    scratch.then("long", "a long text")
    scratch.now("holes", "x" * (2 << 20))
    scratch.now("long", "")
    scratch.back("holes", "long")
    assert scratch.found() == {"holes": "then" + "\0" * ((1 << 20) - 4), "long": "a long text"}
    assert scratch.back("holes", "long") == []


def test_a_file_that_has_got_a_second_name_since_leaves_that_one_alone(scratch: Scratch) -> None:
    """The other name may be a file of the snapshot that was replaced by the link."""
    scratch.then("latest")
    os.link(scratch.now("checkpoint"), scratch.top / "latest")
    scratch.back("latest")
    assert scratch.found() == {"latest": "then", "checkpoint": "later"}


def test_a_file_that_had_two_names_is_not_put_back(scratch: Scratch) -> None:
    """tar has its content under the first name only. The survey refuses such snapshots."""
    os.link(scratch.then("a"), scratch.image / "b")
    scratch.now("a")
    scratch.now("b")
    with pytest.raises(StepFailed, match="cannot be put back: it had other names too"):
        scratch.back("a", "b")


def test_a_file_that_is_read_only_by_now_goes_back(scratch: Scratch) -> None:
    scratch.then("log")
    scratch.now("log").chmod(0o444)
    scratch.back("log")
    assert scratch.found() == {"log": "then"}


def test_who_has_the_file_mapped_is_not_harmed(scratch: Scratch) -> None:
    """A file that is emptied first would end such a program with SIGBUS."""
    scratch.then("log", "then " * 2000)
    with scratch.now("log", "later" * 2000).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mapped[0]
        cut: list[int] = []
        truncate = os.ftruncate

        def noted(fd: int, size: int) -> None:
            cut.append(size)
            truncate(fd, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "ftruncate", noted)
            scratch.back("log")
        assert mapped[:5] == b"then "
        assert cut == [10000]


def test_an_open_file_goes_on_for_others_who_have_it_open(scratch: Scratch) -> None:
    """It is written in place: a reader of the log sees what the job writes after it."""
    scratch.then("log")
    with scratch.now("log").open() as reader:
        scratch.back("log")
        assert reader.read() == "then"


def test_what_has_the_name_now_is_not_replaced(scratch: Scratch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    kept = tmp_path / "elsewhere/log"
    kept.write_text("kept")
    scratch.then("log")
    (scratch.top / "log").mkdir()
    (scratch.top / "log/inside").write_text("kept")
    with pytest.raises(StepFailed, match="cannot be put back: something else"):
        scratch.back("log")
    assert (scratch.top / "log/inside").read_text() == "kept"
    (scratch.top / "log/inside").unlink()
    (scratch.top / "log").rmdir()
    (scratch.top / "log").symlink_to(kept)
    with pytest.raises(StepFailed, match="something else"):
        scratch.back("log")
    assert kept.read_text() == "kept"


def test_nothing_is_written_through_a_link_in_a_directorys_place(
    scratch: Scratch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    kept = tmp_path / "elsewhere/log"
    kept.write_text("kept")
    scratch.then("runs/log")
    (scratch.top / "runs").symlink_to(kept.parent)
    with pytest.raises(StepFailed, match=r"runs/log, which .* cannot be put back: no directory"):
        scratch.back("runs/log")
    assert kept.read_text() == "kept"
    assert (scratch.top / "runs").is_symlink()


@pytest.mark.root
def test_what_was_not_open_is_not_even_looked_at(tmp_path: Path) -> None:
    """Directories of other users, programs with their rights, devices."""
    scratch = Scratch(tmp_path, ALICE)
    tmp_path.chmod(0o755)
    for top in (scratch.image, scratch.top):
        scratch.put(top, "bob/key", "bobs", THEN, BOB)
        os.chown(top / "bob", BOB, BOB)
        (top / "bob").chmod(0o700)
    scratch.then("bob2/gone", uid=BOB)
    for top in (scratch.image, scratch.top):
        scratch.put(top, "tool", "bobs", THEN, BOB).chmod(0o4755)
    os.mknod(scratch.image / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    scratch.then("mine")
    scratch.now("mine")
    assert scratch.back("mine", reads=("tool",)) == ["mine"]
    assert scratch.found() == {"bob/key": "bobs", "mine": "then", "tool": "bobs"}
    assert not (scratch.top / "bob2").exists()


@pytest.mark.root
@pytest.mark.parametrize("user", [ALICE, User(0, 0)], ids=["user", "root"])
def test_a_file_that_is_another_users_now_is_not_replaced(tmp_path: Path, user: User) -> None:
    scratch = Scratch(tmp_path, user)
    tmp_path.chmod(0o755)
    scratch.then("log")
    scratch.now("log", uid=BOB)
    with pytest.raises(StepFailed, match="another user's file, has this name"):
        scratch.back("log")
    assert scratch.found() == {"log": "later"}


@pytest.mark.root
def test_what_the_user_may_not_write_is_refused(tmp_path: Path) -> None:
    """Also what was theirs at the snapshot, says the image."""
    scratch = Scratch(tmp_path, ALICE)
    tmp_path.chmod(0o755)
    os.chown(scratch.top, 0, 0)
    scratch.then("log")
    with pytest.raises(StepFailed, match="user 64001 may not write the open file log here"):
        scratch.back("log")
    assert scratch.found() == {}
    scratch.now("log")
    scratch.back("log")  # the directory is not theirs, but the file is
    assert scratch.found() == {"log": "then"}


def test_a_full_disk_is_named(scratch: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    scratch.then("log")
    unpacker = PuttingBack(scratch.top, MINE, {"log"}, {"log"})
    raw: list[bytes] = []
    tree = Tree("x", scratch.image)
    trees.pack(tree, trees.listing(tree), raw.append)
    unpacker.write(b"".join(raw))
    with monkeypatch.context() as patch:
        patch.setattr("liveshift.criu_glue.files.unpacking.os.write", full)
        with pytest.raises(StepFailed, match=r"log, which the capsule had .*: No space left"):
            unpacker.finish()


# ---- another host ----------------------------------------------------------------------------


def test_to_another_host_all_comes_but_what_is_newer_there(scratch: Scratch) -> None:
    for name in ("log", "notes", "gone"):
        scratch.then(name)
    scratch.put(scratch.top, "log", "earlier", THEN - 5)
    scratch.now("notes")
    scratch.along("log")
    assert scratch.found() == {"log": "then", "notes": "later", "gone": "then"}
    scratch.along("log")  # an attempt that is repeated


def test_a_newer_file_there_is_another_jobs_and_the_capsule_does_not_go_on_with_it(
    scratch: Scratch,
) -> None:
    """Not even if it has the same size."""
    scratch.then("log", "then.")
    scratch.now("log", "later")
    with pytest.raises(StepFailed, match=r"top/log, which the capsule had open .* is newer on"):
        scratch.along("log")
    assert scratch.found() == {"log": "later"}
    assert scratch.along() == []


@pytest.mark.root
def test_what_the_user_may_not_bring_is_left_out(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, ALICE)
    scratch.then("tool", uid=BOB).chmod(0o4755)
    os.mknod(scratch.image / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    scratch.then("log")
    scratch.along("log")
    assert scratch.found() == {"log": "then"}


def test_what_a_capsule_goes_on_with_is_newer_than_any_copy_of_it(scratch: Scratch) -> None:
    """Else another capsule that comes with a copy of it, from after the snapshot, replaces it."""
    before = time.time() - 1
    scratch.put(scratch.top, "log", "then", THEN)
    scratch.put(scratch.top, "notes", "then", THEN)
    touch(scratch.top, ["log", "gone", "log/no directory", "../outside"])
    assert (scratch.top / "log").stat().st_mtime > before
    assert (scratch.top / "notes").stat().st_mtime == THEN
    scratch.put(scratch.image, "log", "since", LATER - 10**9 + 5)
    scratch.along()
    assert scratch.found() == {"log": "then", "notes": "then"}
