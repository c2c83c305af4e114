# SPDX-License-Identifier: Apache-2.0
"""The journal's file by itself: which error it says in which words, and how the backup is made."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from liveshift.runtime.journal import journal_file
from liveshift.runtime.journal.journal_file import JournalError, JournalFile

SCHEMA = "CREATE TABLE IF NOT EXISTS t (n)"
MB = 1 << 20


def opened(path: Path, schema: str = SCHEMA) -> JournalFile:
    return JournalFile(path, schema, 7, (6, 7))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """In a directory that is not there yet."""
    return tmp_path / "var" / "lib" / "journal.sqlite"


@pytest.fixture
def file(path: Path) -> JournalFile:
    return opened(path)


def sqlite(name: str) -> sqlite3.Error:
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorname = name
    return error


@pytest.mark.parametrize(
    ("error", "free", "full"),
    [
        (sqlite("SQLITE_FULL"), 5 * MB, True),
        (sqlite("SQLITE_IOERR_WRITE"), MB - 1, True),
        (sqlite("SQLITE_IOERR_WRITE"), MB, False),
        (sqlite("SQLITE_CANTOPEN"), MB - 1, True),
        (sqlite("SQLITE_CANTOPEN"), MB, False),
        (sqlite("SQLITE_BUSY"), 0, False),
        (OSError("it failed"), MB - 1, True),
        (OSError("it failed"), MB, False),
    ],
)
def test_a_full_disk_is_told_from_other_errors(
    file: JournalFile, monkeypatch: pytest.MonkeyPatch, error: Exception, free: int, full: bool
) -> None:
    monkeypatch.setattr(journal_file, "_free_at", lambda _: (free, Path("/disk")))
    said = str(file._in_words(error, "written"))
    if full:
        assert said.startswith(f"the journal {file.path} cannot be written: the disk at /disk is")
    else:
        assert said == f"the journal {file.path} cannot be written: it failed"


def test_the_disk_that_is_named_is_a_mount(tmp_path: Path) -> None:
    free, disk = journal_file._free_at(tmp_path / "not" / "there")
    assert os.path.ismount(disk)
    assert tmp_path.is_relative_to(disk)
    assert free > 0


def test_errors_while_it_is_opened_and_read_are_in_words(
    tmp_path: Path, path: Path, file: JournalFile
) -> None:
    assert file.problem == ""
    with pytest.raises(JournalError, match="cannot be read: no such table"):
        file.rows("SELECT * FROM absent")
    (tmp_path / "plain").write_text("no directory")
    with pytest.raises(JournalError, match=r"the journal \S+ cannot be opened: "):
        opened(tmp_path / "plain" / "journal.sqlite")
    new = path.with_name("new.sqlite")
    with pytest.raises(JournalError, match="cannot be opened"):
        opened(new, "no SQL")
    assert not new.exists(), "it was not there before"
    with pytest.raises(JournalError, match="cannot be opened"):
        opened(path, "no SQL")
    assert path.exists(), "it was"


def test_one_of_another_format_is_refused_with_what_to_do(path: Path, file: JournalFile) -> None:
    file.write("PRAGMA user_version=8")
    file.close()
    with pytest.raises(JournalError) as caught:
        opened(path)
    said = f"the journal {path} has format 8, this version reads 6 and 7"
    assert str(caught.value) == said
    assert "let the jobs end under the version that wrote it" in str(caught.value.hint)


def test_a_damaged_one_without_a_backup_is_to_be_moved_away(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(JournalError, match="is damaged") as caught:
        opened(path)
    assert "there is no backup: move journal.sqlite* away" in str(caught.value.hint)


def test_changes_are_counted(file: JournalFile) -> None:
    before = file.changes
    file.write_all("INSERT INTO t VALUES (?)", [(1,), (2,), (3,)])
    assert file.changes == before + 3


def test_one_that_was_put_back_is_so_until_it_has_caught_up(path: Path, file: JournalFile) -> None:
    file.back_up()
    file.close()
    shutil.copy(file.backup, path)
    again = opened(path)
    assert again.restored
    again.forget_mark()
    assert not again.restored
    again.close()
    assert not opened(path).restored


def test_a_backup_is_one_whole_file_on_the_disk(
    file: JournalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it takes the old one's place, and though an earlier attempt was broken off."""
    file.backup.write_bytes(b"the earlier one")
    file.backup.with_suffix(".new").write_bytes(b"half of one")
    seen = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(file.backup.read_bytes()))
    file.back_up()
    assert seen == [b"the earlier one"]
    header = file.backup.read_bytes()[:20]
    assert header.startswith(b"SQLite format 3")
    assert header[18:20] == b"\1\1", "no write-ahead log: what it holds is in this file"
    assert not file.backup.with_suffix(".new").exists()


def test_a_backup_that_fails_says_so_and_leaves_nothing(path: Path, file: JournalFile) -> None:
    file.backup.mkdir()
    with pytest.raises(JournalError, match="cannot back the journal up to "):
        file.back_up()
    assert not file.backup.with_suffix(".new").exists()
    path.parent.rename(path.parent.with_name("elsewhere"))
    with pytest.raises(JournalError, match="cannot back the journal up"):
        file.back_up()


@pytest.mark.parametrize("harm", ["removed", "with its log", "replaced"])
def test_a_file_that_vanishes_takes_no_writes_and_not_the_backup(
    path: Path, file: JournalFile, harm: str
) -> None:
    """SQLite writes on into a file that was removed: all of it would be lost at the next start."""
    file.write("INSERT INTO t VALUES (1)")
    file.back_up()
    before = file.backup.read_bytes()
    away = path.rename(path.with_name("away"))
    if harm == "with its log":
        for end in ("-wal", "-shm"):
            path.with_name(path.name + end).unlink()
    if harm == "replaced":
        shutil.copy(file.backup, path)
    with pytest.raises(JournalError, match="is gone, or another file is in its place") as caught:
        file.write("INSERT INTO t VALUES (2)")
    assert "stop the orchestrator" in str(caught.value.hint)
    assert f"copy {file.backup} (of " in str(caught.value.hint)
    assert file.problem == str(caught.value)
    with pytest.raises(JournalError, match="is gone, or another"), file.together():
        raise AssertionError("not begun")
    with pytest.raises(JournalError, match="cannot back the journal up to "):
        file.back_up()
    assert file.backup.read_bytes() == before
    assert path.exists() == (harm == "replaced"), "none was made"
    assert file.rows("SELECT n FROM t") == [(1,)]
    away.rename(path)
    file.write("INSERT INTO t VALUES (3)")
    assert file.problem == ""


def test_a_group_of_writes_is_not_kept_if_the_file_vanishes_meanwhile(
    path: Path, file: JournalFile
) -> None:
    away = path.with_name("away")

    def write() -> None:
        with file.together():
            file.write("INSERT INTO t VALUES (1)")
            path.rename(away)

    with pytest.raises(JournalError, match="is gone"):
        write()
    away.rename(path)
    assert file.rows("SELECT n FROM t") == []
    file.write("INSERT INTO t VALUES (2)")
    assert file.rows("SELECT n FROM t") == [(2,)]


def test_a_path_with_odd_characters_is_backed_up(tmp_path: Path) -> None:
    file = opened(tmp_path / "a ?mode=ro&x=%41#b" / "journal.sqlite")
    file.write("INSERT INTO t VALUES (1)")
    file.back_up()
    assert sqlite3.connect(file.backup).execute("SELECT n FROM t").fetchall() == [(1,)]
