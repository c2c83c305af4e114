# SPDX-License-Identifier: Apache-2.0
"""Which files of a directory that others use go back with a capsule, and which stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from liveshift.criu_glue.files import trees
from liveshift.criu_glue.files.putting_back import PuttingBack
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.files.trees import Tree
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

    def back(self, *opened: str, forced: tuple[str, ...] = ()) -> list[str]:
        """Put all of the image back; return what was written."""
        unpacker = PuttingBack(self.top, self.user, frozenset(opened))
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
    for name in ("log", "runs/log", "notes", "gone", "lost/gone"):
        scratch.then(name)
    for name in ("log", "runs/log", "notes", "new"):
        scratch.now(name)
    written = scratch.back("log", "runs/log")
    assert scratch.found() == {
        "log": "then",
        "runs/log": "then",
        "notes": "later",  # perhaps another job wrote it
        "new": "later",
        "gone": "then",
        "lost/gone": "then",
    }
    assert sorted(written) == ["gone", "log", "lost", "lost/gone", "runs/log"]
    assert (scratch.top / "log").stat().st_mtime == THEN


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


@pytest.mark.parametrize("opened", ["a", "b"])
def test_a_file_with_two_names_stays_one_file(scratch: Scratch, opened: str) -> None:
    """tar has its content under one of the names, and the capsule has opened either."""
    os.link(scratch.then("a"), scratch.image / "b")
    os.link(scratch.now("a"), scratch.top / "b")
    scratch.back(opened)
    assert scratch.found() == {"a": "then", "b": "then"}
    assert (scratch.top / "a").samefile(scratch.top / "b")


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
    with pytest.raises(StepFailed, match="log cannot be put back"):
        scratch.back("log")
    assert (scratch.top / "log/inside").read_text() == "kept"
    (scratch.top / "log/inside").unlink()
    (scratch.top / "log").rmdir()
    (scratch.top / "log").symlink_to(kept)
    with pytest.raises(StepFailed, match="now another file"):
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
    assert scratch.back("runs/log") == []
    assert kept.read_text() == "kept"
    assert (scratch.top / "runs").is_symlink()


@pytest.mark.root
def test_files_of_another_user_stay_and_do_not_come_back(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, ALICE)
    tmp_path.chmod(0o755)
    for name in ("bobs", "bobs-gone"):
        scratch.then(name, uid=BOB)
    scratch.then("mine")
    scratch.now("bobs", uid=BOB)
    scratch.back("mine")
    assert scratch.found() == {"bobs": "later", "mine": "then"}
    assert (scratch.top / "mine").stat().st_uid == ALICE.uid


@pytest.mark.root
@pytest.mark.parametrize("user", [ALICE, User(0, 0)], ids=["user", "root"])
def test_a_file_that_is_another_users_now_is_not_replaced(tmp_path: Path, user: User) -> None:
    scratch = Scratch(tmp_path, user)
    tmp_path.chmod(0o755)
    scratch.then("log")
    scratch.now("log", uid=BOB)
    with pytest.raises(StepFailed, match="another user's, has this name"):
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
