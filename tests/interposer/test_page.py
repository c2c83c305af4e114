# SPDX-License-Identifier: Apache-2.0
"""Pages are read whatever lies there, and what is no page is refused by name."""

from __future__ import annotations

import os
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


def test_what_another_page_has_as_well_is_no_page(tmp_path: Path) -> None:
    """One file with thousands of names would take long to read each time."""
    (tmp_path / "1").write_bytes(page_bytes(pid=1))
    (tmp_path / "2").hardlink_to(tmp_path / "1")
    with pytest.raises(page.PageError, match="another name"):
        page.read(tmp_path / "1")


def test_finished_leaves_out_rows_that_are_free(tmp_path: Path) -> None:
    raw = bytearray(page_bytes(clocks=((7, 6), (5, 5), (2, 2))))
    at = layout.CLOCKS_AT + layout.CLOCK.size
    raw[at : at + 8] = bytes(8)  # its id
    (tmp_path / "1").write_bytes(raw)
    with page.opened(tmp_path / "1") as file:
        assert file.page().finished == sum(clock.returned for clock in file.clocks()) == 8
