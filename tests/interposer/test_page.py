# SPDX-License-Identifier: Apache-2.0
"""Pages are read whatever lies there, and what is no page is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from page_bytes import page_bytes

from liveshift.errors import LiveshiftError
from liveshift.interposer import layout, page


def test_a_page_is_read_field_by_field(tmp_path: Path) -> None:
    (tmp_path / "1234").write_bytes(page_bytes())
    seen = page.read(tmp_path / "1234")
    assert (seen.pid, seen.rank, seen.world_size, seen.local_rank) == (1234, 3, 8, None)
    assert seen.created_ns == 10
    assert seen.version == "9.9.9"
    assert seen.command == "py\N{REPLACEMENT CHARACTER}[2Jthon"
    assert seen.begun == {"gloo.allreduce": 7, "gloo.barrier": 2}
    assert (seen.started, seen.finished) == (9, 8)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (page_bytes(magic=b"ELSEWHAT"), "begins with b'ELSEWHAT'"),
        (
            page_bytes(number=layout.LAYOUT + 1),
            f"layout {layout.LAYOUT + 1}; this version .* {layout.LAYOUT}",
        ),
        (page_bytes(kinds=65), "65 kinds"),
        (page_bytes()[: layout.HEADER_SIZE - 1], "8191 of 8192 bytes"),
        (page_bytes(clocks=((0, 0),) * 4097), "4097 clocks"),
        (page_bytes()[: layout.CLOCKS_AT + 64], "of 8320 bytes"),
        (b"", "0 of 8192 bytes"),
    ],
)
def test_what_is_no_page_is_refused_by_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "1").write_bytes(content)
    with pytest.raises(page.PageError, match=complaint) as caught:
        page.read(tmp_path / "1")
    assert str(tmp_path / "1") in str(caught.value)
    assert isinstance(caught.value, LiveshiftError)


def test_links_and_pipes_put_there_by_the_job_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(page_bytes())
    (tmp_path / "1").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "2")
    (tmp_path / "3").mkdir()
    for name in ("1", "2", "3"):
        with pytest.raises(page.PageError, match=str(tmp_path / name)):
            page.read(tmp_path / name)


def test_a_folder_is_listed_by_pid(tmp_path: Path) -> None:
    assert page.pages(tmp_path / "none") == []
    for pid in (10, 9):
        (tmp_path / str(pid)).write_bytes(page_bytes(pid=pid))
    (tmp_path / ".11").write_bytes(b"a page still being made")
    assert [p.pid for p in page.pages(tmp_path)] == [9, 10]


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
        assert [p.pid for p in page.pages(tmp_path)] == [9]
    assert caplog.text.count(f"{tmp_path}/12") == 1


def test_names_that_are_no_pid_are_not_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("09", "0", "x", "-1", "\N{ARABIC-INDIC DIGIT ONE}"):
        (tmp_path / name).write_bytes(b"junk")
    assert page.pages(tmp_path) == []
    assert not caplog.text


def test_not_more_pages_are_read_than_a_capsule_can_have_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page, "PAGES", 3)
    for pid in range(1, 5):
        (tmp_path / str(pid)).write_bytes(page_bytes(pid=pid))
    assert [p.pid for p in page.pages(tmp_path)] == [1, 2, 3]
    assert "4 pages in" in caplog.text
