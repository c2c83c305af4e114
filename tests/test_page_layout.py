# SPDX-License-Identifier: Apache-2.0
"""page.h and its Python mirror describe the same bytes, and the mirror refuses what is no page."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from liveshift.errors import LiveshiftError
from liveshift.interposer import page

HEADER_FOLDER = Path(__file__).resolve().parent.parent / "interposer"
HEADER_FIELDS = [name for name, _ in page.FIELDS]
COUNTER_FIELDS = [name for name, _ in page.COUNTER_FIELDS]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """What the C compiler makes of page.h: (offset, size) by field, and the constants."""
    folder = tmp_path_factory.mktemp("layout")
    fields = [("page", name) for name in [*HEADER_FIELDS, "counters", "reserved"]]
    fields += [("counter", name) for name in COUNTER_FIELDS]
    lines = [
        f'printf("{owner}.{name} %zu %zu\\n", offsetof(struct liveshift_{owner}, {name}),'
        f" sizeof(((struct liveshift_{owner} *)0)->{name}));"
        for owner, name in fields
    ]
    for constant in ("LAYOUT", "SIZE", "COUNTERS"):
        lines.append(f'printf("{constant} %d\\n", (int)LIVESHIFT_PAGE_{constant});')
    source = folder / "layout.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "page.h"\n'
        "int main(void) {\n" + "\n".join(lines) + "\nputs(LIVESHIFT_PAGE_MAGIC);\n}\n"
    )
    program = folder / "layout"
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [*compiler.split(), "-std=gnu11", "-I", HEADER_FOLDER, "-o", program, source], check=True
    )
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    *rows, magic = printed.splitlines()
    assert magic.encode() == page.MAGIC
    return {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, rows)}


def mirrored(fields: tuple[tuple[str, str], ...]) -> dict[str, tuple[int, int]]:
    """(offset, size) by field, as struct lays them out without padding."""
    places, offset = {}, 0
    for name, code in fields:
        places[name] = (offset, struct.calcsize("<" + code))
        offset += places[name][1]
    return places


def test_header_fields_have_the_same_places(layout: dict[str, tuple[int, ...]]) -> None:
    assert {n: layout[f"page.{n}"] for n in HEADER_FIELDS} == mirrored(page.FIELDS)


def test_counter_fields_have_the_same_places(layout: dict[str, tuple[int, ...]]) -> None:
    in_c = {n: layout[f"counter.{n}"] for n in COUNTER_FIELDS}
    assert in_c == mirrored(page.COUNTER_FIELDS)


def test_no_field_of_the_header_file_is_unmirrored(layout: dict[str, tuple[int, ...]]) -> None:
    """Counters follow the header, the reserve follows them, and nothing lies between or after."""
    counters = page.COUNTERS * page.COUNTER.size
    assert layout["page.counters"] == (page.HEADER.size, counters)
    assert layout["page.reserved"] == (
        page.HEADER.size + counters,
        page.SIZE - page.HEADER.size - counters,
    )


def test_constants(layout: dict[str, tuple[int, ...]]) -> None:
    assert layout["LAYOUT"] == (page.LAYOUT,)
    assert layout["SIZE"] == (page.SIZE,)
    assert layout["COUNTERS"] == (page.COUNTERS,)


def made(
    *, magic: bytes = page.MAGIC, layout: int = page.LAYOUT, kinds: int = 2, pid: int = 1234
) -> bytes:
    """The bytes of a page with two counters."""
    header = page.HEADER.pack(
        magic, layout, kinds, pid, 3, 8, -1, 10, b"9.9.9", b"py\x1b[2Jthon", 20, 15
    )
    counters = page.COUNTER.pack(b"gloo.allreduce", 7, 6) + page.COUNTER.pack(b"gloo.barrier", 2, 2)
    return (header + counters).ljust(page.SIZE, b"\0")


def test_a_page_is_read_field_by_field(tmp_path: Path) -> None:
    (tmp_path / "1234").write_bytes(made())
    seen = page.read(tmp_path / "1234")
    assert (seen.pid, seen.rank, seen.world_size, seen.local_rank) == (1234, 3, 8, None)
    assert (seen.created_ns, seen.last_started_ns, seen.last_finished_ns) == (10, 20, 15)
    assert seen.version == "9.9.9"
    assert seen.command == "py\N{REPLACEMENT CHARACTER}[2Jthon"
    assert seen.counters == {
        "gloo.allreduce": page.Counter(7, 6),
        "gloo.barrier": page.Counter(2, 2),
    }
    assert (seen.started, seen.finished, seen.in_flight) == (9, 8, 1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (made(magic=b"ELSEWHAT"), "begins with b'ELSEWHAT'"),
        (made(layout=page.LAYOUT + 1), f"layout {page.LAYOUT + 1}; this version .* {page.LAYOUT}"),
        (made(kinds=65), "65 kinds"),
        (made()[:-1], "4095 of 4096 bytes"),
        (b"", "0 of 4096 bytes"),
    ],
)
def test_what_is_no_page_is_refused_by_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "1").write_bytes(content)
    with pytest.raises(page.PageError, match=complaint) as caught:
        page.read(tmp_path / "1")
    assert str(tmp_path / "1") in str(caught.value)
    assert isinstance(caught.value, LiveshiftError)


def test_links_and_pipes_put_there_by_the_job_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(made())
    (tmp_path / "1").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "2")
    (tmp_path / "3").mkdir()
    for name in ("1", "2", "3"):
        with pytest.raises(page.PageError, match=str(tmp_path / name)):
            page.read(tmp_path / name)


def test_a_folder_is_listed_by_pid(tmp_path: Path) -> None:
    assert page.pages(tmp_path / "none") == []
    for pid in (10, 9):
        (tmp_path / str(pid)).write_bytes(made(pid=pid))
    (tmp_path / ".11").write_bytes(b"a page still being made")
    assert [p.pid for p in page.pages(tmp_path)] == [9, 10]


UNREADABLE = {
    "junk": lambda path: path.write_bytes(b"junk"),
    "another layout": lambda path: path.write_bytes(made(pid=12, layout=99)),
    "another process": lambda path: path.write_bytes(made(pid=13)),
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to("9"),
    "a directory": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("put", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_read_is_said_once_and_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, put: Callable[[Path], object]
) -> None:
    (tmp_path / "9").write_bytes(made(pid=9))
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
        (tmp_path / str(pid)).write_bytes(made(pid=pid))
    assert [p.pid for p in page.pages(tmp_path)] == [1, 2, 3]
    assert "4 pages in" in caplog.text
