# SPDX-License-Identifier: Apache-2.0
"""An image replaces the capsule's own files in a carried directory, whatever their times say."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from liveshift.criu_glue.files import trees, unpacking
from liveshift.criu_glue.files.sparing import Sparing, Stamps
from liveshift.criu_glue.files.trees import Stamp, Tree
from liveshift.criu_glue.files.unpacking import Unpacker
from liveshift.errors import StepFailed

EARLY, LATE = 1_600_000_000, 1_700_000_000


class Visit:
    """Both passes of a capsule's move from one directory to another."""

    def __init__(self, here: Path, there: Path, left: Stamps | None = None) -> None:
        self.here, self.there = here, there
        self.sparing = Sparing(left)
        self._before: dict[str, Stamp] = {}

    def first(self) -> None:
        self._before = self.now()
        self._bring(self._before, running=True)

    def second(self, forced: tuple[str, ...] = ()) -> None:
        now = self.now()
        self._bring(trees.changed(self._before, now, forced), forced)

    def now(self) -> dict[str, Stamp]:
        return trees.listing(Tree("carried", self.here))

    def both(self) -> dict[str, Stamp]:
        """Returns what the capsule leaves behind, as its host notes it."""
        self.first()
        self.second()
        return self.now()

    def _bring(
        self,
        names: dict[str, Stamp] | list[str],
        forced: tuple[str, ...] = (),
        *,
        running: bool = False,
    ) -> None:
        unpacker = Unpacker(self.there, self.sparing, running=running)
        try:
            trees.pack(Tree("carried", self.here), names, unpacker.write, forced)
        finally:
            unpacker.finish()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


def write(path: Path, text: str, when: float = LATE) -> Path:
    path.write_text(text)
    os.utime(path, (when, when))
    return path


def described(top: Path) -> dict[str, tuple[object, ...]]:
    def one(path: Path) -> tuple[object, ...]:
        s = path.lstat()
        if path.is_symlink():
            return (os.readlink(path),)
        return s.st_mode, s.st_uid, s.st_nlink, path.read_text() if path.is_file() else None

    return {str(path.relative_to(top)): one(path) for path in top.rglob("*")}


def copy_an_older_one(top: Path) -> None:
    shutil.copy2(top / "best", top / "file")


def rename_an_older_one(top: Path) -> None:
    (top / "best").replace(top / "file")


def link_an_older_one(top: Path) -> None:
    (top / "file").unlink()
    os.link(top / "best", top / "file")


def set_its_time_back(top: Path) -> None:
    write(top / "file", "other")


def make_it_secret(top: Path) -> None:
    (top / "file").chmod(0o600)
    (top / "folder").chmod(0o700)


def point_elsewhere(top: Path) -> None:
    (top / "link").unlink()
    (top / "link").symlink_to("file")


def link_an_old_name(top: Path) -> None:
    point_elsewhere(top)
    os.utime(top / "link", (EARLY, EARLY), follow_symlinks=False)


@pytest.mark.parametrize(
    "change",
    [
        copy_an_older_one,
        rename_an_older_one,
        link_an_older_one,
        set_its_time_back,
        make_it_secret,
        point_elsewhere,
        link_an_old_name,
    ],
)
def test_what_changes_between_the_passes_comes_though_it_is_not_newer(
    here: Path, there: Path, change: Callable[[Path], None]
) -> None:
    write(here / "file", "later")
    write(here / "best", "early", EARLY)
    (here / "folder").mkdir()
    (here / "link").symlink_to("best")
    visit = Visit(here, there)
    visit.first()
    change(here)
    visit.second()
    trees.remove(there, {path.name for path in there.iterdir()} - {*visit.now()})
    assert described(there) == described(here)


def test_a_link_has_its_own_time(here: Path, there: Path) -> None:
    """If a link had the time of its unpacking, it would be newer than a later one of the job's."""
    (here / "link").symlink_to("file")
    os.utime(here / "link", (EARLY, EARLY), follow_symlinks=False)
    Visit(here, there).both()
    assert (there / "link").lstat().st_mtime == EARLY


def test_what_another_program_has_changed_between_the_passes_stays(here: Path, there: Path) -> None:
    write(here / "file", "first", EARLY)
    visit = Visit(here, there)
    visit.first()
    write(there / "file", "another program's", LATE)
    write(here / "file", "second", EARLY + 1)
    visit.second()
    assert (there / "file").read_text() == "another program's"


def test_a_capsule_that_returns_replaces_what_it_left(here: Path, there: Path) -> None:
    """It does so even if the clock of the host that it left was ahead."""
    write(here / "state", "step 100", LATE)
    left = Visit(here, there).both()
    write(there / "state", "step 230", LATE - 30)
    Visit(there, here, left).both()
    assert (here / "state").read_text() == "step 230"


def test_what_others_have_changed_since_stays_if_it_is_newer(here: Path, there: Path) -> None:
    write(here / "state", "step 100", EARLY)
    left = Visit(here, there).both()
    write(here / "state", "another job's", LATE)
    write(there / "state", "step 230", LATE - 30)
    Visit(there, here, left).both()
    assert (here / "state").read_text() == "another job's"


def test_rights_that_others_have_taken_away_since_stay_so(here: Path, there: Path) -> None:
    write(here / "secret", "of another job", EARLY)
    (here / "folder").mkdir(mode=0o755)
    left = Visit(here, there).both()
    (here / "secret").chmod(0o600)
    (here / "folder").chmod(0o700)
    (there / "secret").chmod(0o644)
    Visit(there, here, left).both()
    assert (here / "secret").stat().st_mode & 0o7777 == 0o600
    assert (here / "folder").stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_directory_with_files_of_others_is_not_removed(
    here: Path, there: Path, kind: str
) -> None:
    (here / "folder" / "inside").mkdir(parents=True)
    write(here / "folder" / "mine", "left here")
    left = Visit(here, there).both()
    write(here / "folder" / "inside" / "others", "another program's")
    shutil.rmtree(there / "folder")
    if kind == "link":
        (there / "folder").symlink_to("elsewhere")
    else:
        write(there / "folder", "a file now", LATE + 9)
    now = time.time() + 9
    os.utime(there / "folder", (now, now), follow_symlinks=False)
    with pytest.raises(StepFailed, match="folder/inside is a directory on this host, in which"):
        Visit(there, here, left).both()
    assert (here / "folder" / "inside" / "others").read_text() == "another program's"
    (here / "folder" / "inside" / "others").unlink()
    Visit(there, here, left).both()
    assert described(here) == described(there)


def test_a_directory_that_the_job_replaces_between_the_passes_is_replaced(
    here: Path, there: Path
) -> None:
    (here / "folder" / "inside").mkdir(parents=True)
    write(here / "folder" / "inside" / "file", "x")
    visit = Visit(here, there)
    visit.first()
    shutil.rmtree(here / "folder")
    (here / "folder").symlink_to("elsewhere")
    os.utime(here / "folder", (EARLY, EARLY), follow_symlinks=False)
    visit.second()
    assert described(there) == described(here)


def test_another_programs_newer_link_in_a_directorys_place_is_named(
    here: Path, there: Path
) -> None:
    (here / "folder").mkdir()
    os.utime(here / "folder", (EARLY, EARLY))
    (there / "folder").symlink_to("elsewhere")
    with pytest.raises(StepFailed, match="folder is a directory at the source; another program"):
        Visit(here, there).both()
    assert (there / "folder").is_symlink()


def test_a_pipe_that_another_program_may_have_open_stays(here: Path, there: Path) -> None:
    os.mkfifo(here / "pipe")
    left = Visit(here, there).both()
    before = (here / "pipe").stat().st_ino
    Visit(there, here, left).both()
    assert (here / "pipe").stat().st_ino == before


def test_what_another_program_takes_away_at_once_is_no_failure(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "new", "x")
    link = os.link

    def taken(source: str, name: str, *, dst_dir_fd: int, follow_symlinks: bool) -> None:
        link(source, name, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        (there / "new").unlink()

    monkeypatch.setattr(os, "link", taken)
    Visit(here, there).both()


def test_what_did_not_change_elsewhere_is_the_same_file(here: Path, there: Path) -> None:
    """A program that has it open goes on with it. Only owner and mode may be new."""
    write(here / "log", "lines", EARLY)
    left = Visit(here, there).both()
    (there / "log").chmod(0o600)
    with (here / "log").open("a") as log:
        Visit(there, here, left).both()
        log.write(" and more")
    assert (here / "log").read_text() == "lines and more"
    assert (here / "log").stat().st_mode & 0o7777 == 0o600


def test_what_was_written_through_a_mapping_comes_with_the_same_time(
    here: Path, there: Path
) -> None:
    write(here / "mapped", "before", EARLY)
    left = Visit(here, there).both()
    write(there / "mapped", "behind", EARLY)
    visit = Visit(there, here, left)
    visit.first()
    visit.second(forced=("mapped",))
    assert (here / "mapped").read_text() == "behind"


def break_off(here: Path, there: Path) -> None:
    sent: list[bytes] = []
    trees.pack(Tree("carried", here), ["data"], lambda data: sent.append(bytes(data)))
    unpacker = Unpacker(there, Sparing())
    unpacker.write(b"".join(sent)[: 2 << 20])
    with pytest.raises(StepFailed, match="the stream of files is damaged"):
        unpacker.finish()


@pytest.mark.parametrize("nameless", [True, False])
def test_a_stream_that_breaks_off_leaves_no_part_of_a_file(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    """A part would be newer than the file itself. ``nameless``: whether the file system has files
    without a name."""
    if not nameless:
        monkeypatch.setattr(unpacking, "_nameless", lambda _parent: None)
    (here / "data").write_bytes(os.urandom(3 << 20))
    os.utime(here / "data", (EARLY, EARLY))
    break_off(here, there)
    assert list(there.iterdir()) == []
    Visit(here, there).both()
    assert (there / "data").read_bytes() == (here / "data").read_bytes()


def test_until_a_file_is_complete_the_one_that_is_there_stays(here: Path, there: Path) -> None:
    write(here / "data", "x" * (3 << 20), LATE)
    write(there / "data", "older", EARLY)
    break_off(here, there)
    assert (there / "data").read_text() == "older"


@pytest.mark.parametrize("made", [True, False])
def test_the_top_is_dressed_if_it_was_made_for_the_image(
    here: Path, there: Path, made: bool
) -> None:
    here.chmod(0o2775)
    visit = Visit(here, there)
    visit.sparing = Sparing(made=made)
    visit.both()
    assert (there.stat().st_mode & 0o7777 == 0o2775) is made
