# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that was written under another name when a snapshot was taken is begun again."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from liveshift.criu_glue.files import statx
from liveshift.criu_glue.files.identity import Identity
from liveshift.criu_glue.files.rights import User
from liveshift.runtime.agent.host import renamed_files
from liveshift.runtime.agent.host.cut_back import cut_back

pytestmark = pytest.mark.root

ALICE, BOB, GROUP = 1001, 1002, 2000
USER = User(ALICE, ALICE, (GROUP,))
HUNDRED, NEXT = b"a checkpoint of step 100", b"200, not 100"
BEGUN = 12


class Shared:
    """A directory of ALICE's on a shared path. At the snapshot she had written 12 bytes of the
    file ``tmp``."""

    def __init__(self, top: Path) -> None:
        self.top, self.path = top, bytes(top / "tmp")
        self.write("tmp", HUNDRED[:BEGUN])
        self.known = self.identity("tmp")

    def write(self, name: str, content: bytes, owner: int = ALICE) -> None:
        """Write into the file that has the name."""
        with (self.top / name).open("r+b" if (self.top / name).exists() else "wb") as file:
            file.write(content)
        os.chown(self.top / name, owner, owner)

    def identity(self, name: str) -> Identity:
        return statx.identity(str(self.top / name))

    def complete(self) -> None:
        self.write("tmp", HUNDRED)
        (self.top / "tmp").rename(self.top / "step-100")

    def back(self, until: float | None = None, user: User = USER) -> tuple[list[str], list[str]]:
        limit = time.monotonic() + 60 if until is None else until
        return cut_back(user, {self.path: BEGUN}, limit, {self.path: self.known})

    def found(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.top.iterdir()}


@pytest.fixture
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory(prefix="ls-shared-") as name:
        os.chown(name, ALICE, ALICE)
        yield Shared(Path(name))


def test_what_was_renamed_is_begun_again_under_its_old_name(shared: Shared) -> None:
    os.chown(shared.top / "tmp", ALICE, GROUP)
    (shared.top / "tmp").chmod(0o600)
    shared.known = shared.identity("tmp")
    shared.complete()
    os.chown(shared.top / "step-100", ALICE, GROUP)
    (shared.top / "step-100").chmod(0o644)
    assert shared.back() == ([f"{shared.top}/tmp (made again from step-100)"], [])
    assert shared.found() == {"tmp": HUNDRED[:BEGUN], "step-100": HUNDRED}
    made = (shared.top / "tmp").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (ALICE, GROUP, 0o600)
    assert shared.back() == ([], []), "once is enough"


def test_the_next_one_that_has_the_name_by_now_is_kept(shared: Shared) -> None:
    for number in (1, 2):
        shared.complete()
        shared.write("tmp", NEXT)
        aside = f"tmp.before-rewind-{number}"
        text = f"{shared.top}/tmp (made again from step-100; what had its name is {aside})"
        assert shared.back() == ([text], [])
        assert shared.back() == ([], [])
        assert shared.found()[aside] == NEXT
        assert shared.found()["tmp"] == HUNDRED[:BEGUN]
        shared.known = shared.identity("tmp")
    assert shared.found()["step-100"] == HUNDRED


def test_a_file_that_kept_its_name_is_cut(shared: Shared) -> None:
    shared.write("tmp", HUNDRED)
    assert shared.back() == ([f"{shared.top}/tmp (by 12 B)"], [])
    assert shared.found() == {"tmp": HUNDRED[:BEGUN]}


def test_without_the_file_nothing_is_made(shared: Shared) -> None:
    shared.complete()
    (shared.top / "step-100").unlink()
    assert shared.back() == ([], []), "the restore says so"
    (shared.top / "keeps the inode").touch()
    shared.write("tmp", NEXT * 2)
    assert shared.back() == ([f"{shared.top}/tmp (by 12 B)"], []), "it is all that there is"
    assert shared.found()["tmp"] == NEXT
    (shared.top / "keeps the inode").unlink()
    shared.top.joinpath("tmp").unlink()
    shared.top.rmdir()
    assert shared.back() == ([], [])
    shared.top.mkdir()


def test_what_cannot_be_made_again_is_named(shared: Shared) -> None:
    shared.complete()
    late = f"{shared.top}/tmp (its file system took too long)"
    assert shared.back(time.monotonic() - 1) == ([], [late])
    os.truncate(shared.top / "step-100", 5)
    text = f"{shared.top}/tmp (it is step-100 now, and shorter than it was)"
    assert shared.back() == ([], [text])
    assert set(shared.found()) == {"step-100"}


def test_what_is_no_file_keeps_the_name(shared: Shared) -> None:
    shared.complete()
    (shared.top / "tmp").mkdir()
    assert shared.back() == ([], [])
    assert (shared.top / "tmp").is_dir()


def test_nothing_is_made_with_more_rights_than_the_user_has(shared: Shared) -> None:
    shared.complete()
    os.chown(shared.top / "step-100", BOB, BOB)
    (shared.top / "step-100").chmod(0o600)
    assert shared.back() == ([], [f"{shared.top}/tmp (Permission denied)"])
    (shared.top / "step-100").chmod(0o644)
    shared.top.chmod(0o555)
    assert shared.back() == ([], [f"{shared.top}/tmp (Permission denied)"])
    shared.top.chmod(0o755)
    (shared.top / "link").symlink_to("step-100")
    shared.known = Identity((shared.top / "link").lstat().st_ino, 0, 0o644)
    assert shared.back() == ([], []), "a link is not followed"


def test_a_group_that_the_user_is_not_in_is_not_made_up(shared: Shared) -> None:
    shared.complete()
    os.chown(shared.top / "step-100", ALICE, BOB)
    text = f"{shared.top}/tmp (the job's user cannot give it its group {BOB} back)"
    assert shared.back() == ([], [text])
    assert set(shared.found()) == {"step-100"}


@pytest.mark.parametrize("copies", [True, False])
def test_large_files_are_copied_by_parts(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    """``copies``: whether the file system can copy by itself."""

    def cannot(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(renamed_files, "CHUNK", 5)
    if not copies:
        monkeypatch.setattr(os, "copy_file_range", cannot)
    shared.complete()
    shared.back()
    assert shared.found()["tmp"] == HUNDRED[:BEGUN]
    assert shared.back() == ([], [])


def test_a_file_that_takes_the_name_meanwhile_is_not_cut(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liveshift.runtime.agent.host.cut_back._is_still", lambda *_: True)
    shared.complete()
    shared.write("tmp", NEXT * 2)
    text = f"{shared.top}/tmp (another file has taken its name just now)"
    assert shared.back() == ([], [text])
    assert shared.found()["tmp"] == NEXT * 2


def test_a_full_disk_leaves_no_part(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.complete()
    shared.write("tmp", NEXT)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(renamed_files, "_copy", full)
    assert shared.back() == ([], [f"{shared.top}/tmp (No space left on device)"])
    assert shared.found() == {"step-100": HUNDRED, "tmp": NEXT}


def test_a_log_that_was_rotated_stays_as_it_is(shared: Shared) -> None:
    """It was open only for appending. A copy of what has another name now would have all its lines
    twice; and what has the name now is another file, which is not cut."""
    shared.complete()
    shared.write("tmp", NEXT * 3)
    before = shared.found()
    until = time.monotonic() + 60
    for which in ({shared.path: shared.known}, {}):  # some file systems do not tell which it was
        cut, left = cut_back(USER, {shared.path: BEGUN}, until, which, [shared.path])
        assert (cut, left) == ([], [f"{shared.top}/tmp (another file may have its name since)"])
    assert shared.found() == before


def test_a_log_that_has_its_name_is_cut_back(shared: Shared) -> None:
    shared.write("tmp", HUNDRED)
    until, which = time.monotonic() + 60, {shared.path: shared.known}
    cut, left = cut_back(USER, {shared.path: BEGUN}, until, which, [shared.path])
    assert (len(cut), left) == (1, [])
    assert shared.found() == {"tmp": HUNDRED[:BEGUN]}
