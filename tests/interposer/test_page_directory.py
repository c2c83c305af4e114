# SPDX-License-Identifier: Apache-2.0
"""The pages of a capsule are read at a bounded cost, and no file there hides another."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from page_bytes import page_bytes

from liveshift.interposer import layout, page_directory
from liveshift.interposer.page import PageFile
from liveshift.interposer.page_directory import pages


def test_a_folder_is_listed_by_pid(tmp_path: Path) -> None:
    assert pages(tmp_path / "none") == []
    for pid in (10, 9):
        (tmp_path / str(pid)).write_bytes(page_bytes(pid=pid))
    (tmp_path / ".11").write_bytes(b"a page still being made")
    assert [p.pid for p in pages(tmp_path)] == [9, 10]


UNREADABLE = {
    "junk": lambda path: path.write_bytes(b"junk"),
    "another layout": lambda path: path.write_bytes(page_bytes(pid=12, number=99)),
    "another process": lambda path: path.write_bytes(page_bytes(pid=13)),
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to("9"),
    "a directory": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("put", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_read_is_said_once_and_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, put: Callable[[Path], object]
) -> None:
    (tmp_path / "9").write_bytes(page_bytes(pid=9))
    put(tmp_path / "12")
    for _ in range(3):
        assert [p.pid for p in pages(tmp_path)] == [9]
    assert caplog.text.count(f"{tmp_path}/12") == 1


def test_names_that_are_no_pid_are_not_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("09", "0", "x", "-1", "\N{ARABIC-INDIC DIGIT ONE}"):
        (tmp_path / name).write_bytes(b"junk")
    assert pages(tmp_path) == []
    assert not caplog.text


def test_only_pages_of_these_processes_are_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else lies there, and however much of it: it is not even listed."""
    for pid in (3, 9, 12):
        (tmp_path / str(pid)).write_bytes(page_bytes(pid=pid))
    (tmp_path / "1").write_bytes(b"junk")
    monkeypatch.setattr(os, "listdir", None)
    assert [p.pid for p in pages(tmp_path, {12, 5, 9})] == [9, 12]
    assert pages(tmp_path / "none", {12}) == []
    assert not caplog.text


def test_a_page_under_the_name_of_another_process_is_not_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables would cost the most."""
    for pid in range(1, 9):
        (tmp_path / str(pid)).write_bytes(page_bytes(pid=1))
    read: list[str] = []
    real = PageFile.page

    def page(self: PageFile) -> object:
        read.append(self.path.name)
        return real(self)

    monkeypatch.setattr(PageFile, "page", page)
    assert [p.pid for p in pages(tmp_path, range(1, 9))] == [1]
    assert read == ["1"]


def test_a_capsules_pages_are_read_up_to_a_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_directory, "ROWS", 2 * layout.CLOCKS)
    full = ((1, 1),) * layout.CLOCKS
    for pid in range(1, 5):
        (tmp_path / str(pid)).write_bytes(page_bytes(pid=pid, clocks=full))
    for _ in range(2):
        seen = pages(tmp_path, range(1, 5))
        assert [(p.pid, p.finished) for p in seen] == [(1, layout.CLOCKS), (2, layout.CLOCKS)]
    assert caplog.text.count("more than 8192 clocks") == 1


def test_a_count_of_rows_that_cannot_be_hides_no_other_page(tmp_path: Path) -> None:
    raw = bytearray(page_bytes(pid=1))
    layout.TABLES.struct.pack_into(raw, layout.TABLES_AT, 0xFFFFFFFF, 0, 0, 0, 0)
    (tmp_path / "1").write_bytes(raw)
    (tmp_path / "2").write_bytes(page_bytes(pid=2))
    assert [p.pid for p in pages(tmp_path, (1, 2))] == [2]
