# SPDX-License-Identifier: Apache-2.0
"""page.h and its Python mirror describe the same bytes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from checkout import INTERPOSER

from liveshift.interposer import layout

HEADER = INTERPOSER / "gate/page.h"

RECORDS = {
    "order": layout.ORDER,
    "answer": layout.ANSWER,
    "ledger": layout.LEDGER,
    "counter": layout.COUNTER,
    "missing_clock": layout.MISSING_CLOCK,
    "thread": layout.THREAD,
    "clock": layout.CLOCK,
    "communicator": layout.COMMUNICATOR,
    "stream": layout.STREAM,
    "allocation": layout.ALLOCATION,
}
PLACES = {
    "order": layout.ORDER_AT,
    "answer": layout.ANSWER_AT,
    "ledger": layout.LEDGER_AT,
    "threads": layout.THREADS_AT,
    "counters": layout.COUNTERS_AT,
    "missing_clocks": layout.MISSING_CLOCKS_AT,
} | {name: layout.TABLES_AT + at for name, at in layout.TABLES.offsets.items()}
PLACES |= {name: at for name, at in layout.IDENTITY.offsets.items()}
CONSTANTS = {
    "LIVESHIFT_PAGE_LAYOUT": layout.LAYOUT,
    "LIVESHIFT_PAGE_COUNTERS": layout.COUNTERS,
    "LIVESHIFT_PAGE_THREADS": layout.THREADS,
    "LIVESHIFT_PAGE_MISSING_CLOCKS": layout.MISSING_CLOCKS,
    "LIVESHIFT_PAGE_CLOCKS": layout.CLOCKS,
    "LIVESHIFT_PAGE_COMMUNICATORS": layout.COMMUNICATORS,
    "LIVESHIFT_PAGE_STREAMS": layout.STREAMS,
    "LIVESHIFT_PAGE_ALLOCATIONS": layout.ALLOCATIONS,
    "LIVESHIFT_HEADER_SIZE": layout.HEADER_SIZE,
    "LIVESHIFT_CLOCKS_AT": layout.CLOCKS_AT,
    "LIVESHIFT_COMMUNICATORS_AT": layout.COMMUNICATORS_AT,
    "LIVESHIFT_STREAMS_AT": layout.STREAMS_AT,
    "LIVESHIFT_ALLOCATIONS_AT": layout.ALLOCATIONS_AT,
    "LIVESHIFT_PAGE_SIZE": layout.SIZE,
}
ENUMS = {
    "LIVESHIFT_": (layout.WantedState, layout.Library),
    "LIVESHIFT_COMM_": (layout.CommunicatorState,),
    "LIVESHIFT_MEMORY_": (layout.MemoryKind,),
}


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """What the C compiler makes of page.h: (offset, size) by field, sizes, constants."""
    folder = tmp_path_factory.mktemp("layout")
    lines = []
    fields = [(owner, name) for owner, record in RECORDS.items() for name in record.offsets]
    for owner, name in [*fields, *(("page", name) for name in PLACES if name != "unused")]:
        lines.append(
            f'printf("{owner}.{name} %zu %zu\\n", offsetof(struct liveshift_{owner}, {name}),'
            f" sizeof(((struct liveshift_{owner} *)0)->{name}));"
        )
    lines += [f'printf("{owner} %zu\\n", sizeof(struct liveshift_{owner}));' for owner in RECORDS]
    constants = [*CONSTANTS, *(p + e.name for p, es in ENUMS.items() for en in es for e in en)]
    lines += [f'printf("{name} %d\\n", (int){name});' for name in constants]
    source = folder / "layout.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "gate/page.h"\n'
        "int main(void) {\n" + "\n".join(lines) + "\nputs(LIVESHIFT_PAGE_MAGIC);\n}\n"
    )
    program = folder / "layout"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-std=gnu11", f"-I{INTERPOSER}", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    *rows, magic = printed.splitlines()
    assert magic.encode() == layout.MAGIC
    return {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, rows)}


@pytest.mark.parametrize("owner", RECORDS)
def test_fields_have_the_same_places(in_c: dict[str, tuple[int, ...]], owner: str) -> None:
    record = RECORDS[owner]
    sizes = dict(zip(record.offsets, [*record.offsets.values(), record.size][1:], strict=True))
    mirrored = {name: (at, sizes[name] - at) for name, at in record.offsets.items()}
    assert {name: in_c[f"{owner}.{name}"] for name in record.offsets} == mirrored
    assert in_c[owner] == (record.size,)


@pytest.mark.parametrize("owner", RECORDS)
def test_no_field_of_the_header_is_unmirrored(owner: str) -> None:
    """By reading page.h: every name that is declared in the structure is in the mirror."""
    text = HEADER.read_text()
    body = text.split(f"struct liveshift_{owner} {{", 1)[1].split("\n};", 1)[0]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    declared = [
        re.sub(r"\[.*", "", name).strip()
        for statement in body.split(";")
        if statement.strip()
        for name in re.sub(r"^\s*(_Atomic\s+)?\w+\s+", "", statement.strip()).split(",")
    ]
    assert declared == list(RECORDS[owner].offsets)


def test_the_parts_of_the_header_follow_each_other(in_c: dict[str, tuple[int, ...]]) -> None:
    places = {name: in_c[f"page.{name}"][0] for name in PLACES if name != "unused"}
    assert places == {name: at for name, at in PLACES.items() if name != "unused"}


def test_constants(in_c: dict[str, tuple[int, ...]]) -> None:
    assert {name: in_c[name] for name in CONSTANTS} == {n: (v,) for n, v in CONSTANTS.items()}


def test_enumerations(in_c: dict[str, tuple[int, ...]]) -> None:
    for prefix, mirrors in ENUMS.items():
        for mirror in mirrors:
            for member in mirror:
                assert in_c[prefix + member.name] == (member.value,)


def test_an_orders_check_is_the_same_in_c(tmp_path: Path) -> None:
    """gate.c's check_of, compiled, against layout.check_of."""
    source = tmp_path / "check.c"
    source.write_text(
        '#include <stdio.h>\n#include "gate/gate.c"\n'
        "int main(void) { struct order o = {3, 4000000000u, 77};"
        ' printf("%u\\n", check_of(&o)); }\n'
    )
    program = tmp_path / "check"
    compiler = os.environ.get("CC", "cc").split()
    flags = ["-std=gnu11", "-D_GNU_SOURCE", f"-I{INTERPOSER}", "-pthread"]
    subprocess.run([*compiler, *flags, "-o", program, source], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert int(said) == layout.check_of(3, 4000000000, 77)
    assert layout.check_of(0, 0, 0) == 0xFFFFFFFF  # what a fresh page says: open
