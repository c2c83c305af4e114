# SPDX-License-Identifier: Apache-2.0
"""Which headers of a folder of C others may include: its face. The rest is its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

FACES = {
    "criu_glue/memory": {
        "prefill": {"cold.h"},
        "store": {"page_map.h", "store.h"},
    },
    "interposer": {
        "cuda": {"arena_blocks.h", "arena_devices.h", "cuda_real.h", "device_calls.h"},
        "gate": {"clocks.h", "page.h", "process.h", "thread.h"},
        "hooks": {"elf_lookup.h", "exported.h", "forward.h", "kinds.h"},
        "ledger": {"graphs.h", "ledger.h", "ledger_rows.h", "streams.h"},
        "nccl": {"nccl_calls.h", "nccl_operations.h", "vcomm.h"},
        "service": {"service.h"},
        "session": {"device_memory.h"},
    },
}


def includes(top: Path) -> Iterator[tuple[Path, Path]]:
    """Each file with a header that it includes from another folder, both relative to the top."""
    for file in top.rglob("*.[ch]"):
        for name in re.findall(r'^#\s*include "([^"]+)"', file.read_text(), re.MULTILINE):
            beside = file.parent / name
            header = beside if beside.exists() else top / name
            assert header.exists(), f"{file.relative_to(ROOT)} includes {name}"
            if header.parent != file.parent:
                yield file.relative_to(top), header.relative_to(top)


@pytest.mark.parametrize("top", FACES)
def test_a_folder_includes_only_the_faces_of_others(top: str) -> None:
    seen: dict[str, set[str]] = {}
    for _, header in includes(ROOT / top):
        if header.parent != Path():  # what lies at the top is everybody's
            seen.setdefault(header.parent.as_posix(), set()).add(header.name)
    assert seen == FACES[top], "FACES names each header that another folder includes, and no other"
