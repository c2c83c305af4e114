# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: which may import which. And how many files a folder may have, there and
in integration/."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from checkout import ROOT

FOLDERS = ("criu_glue", "cuda_snapshot", "interposer", "launcher", "runtime")
MOST = 26
"""Files of its own that a folder may have."""

LAYERS = (
    (".", "criu_glue.memory", "runtime"),
    ("criu_glue.capsule", "criu_glue.files", "criu_glue.network"),
    ("criu_glue.memory.source", "criu_glue.memory.store", "cuda_snapshot", "interposer"),
    ("criu_glue.images", "criu_glue.memory.fill", "cuda_snapshot.fast_path"),
    ("criu_glue.memory.prefill", "criu_glue.survey", "cuda_snapshot.helper"),
    ("criu_glue.criu",),
    ("criu_glue",),  # fetch.py
    ("runtime.config",),
    ("runtime.daemon", "runtime.messages"),
    ("runtime.control", "runtime.model"),
    ("runtime.cost", "runtime.journal", "runtime.wire"),
    ("runtime.agent.host", "runtime.migration"),
    ("runtime.agent.gpu", "runtime.quiesce", "runtime.snapshot"),
    ("runtime.agent.departure", "runtime.orchestrator"),
    ("runtime.agent.arrival",),
    ("runtime.agent.holding",),
    ("runtime.agent",),
    ("launcher.client", "launcher.report"),
    ("launcher.lab", "launcher.show"),
    ("launcher.checks",),
    ("launcher.commands",),
    ("launcher",),
)
"""Each room imports from itself and from rooms in the lines above its own. So no line imports from
the same line, and nothing imports upwards."""

HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}


def modules() -> dict[str, Path]:
    """By dotted name within the package; a room's ``__init__`` has the room's name."""
    files = [*ROOT.glob("*.py"), *(f for top in FOLDERS for f in (ROOT / top).rglob("*.py"))]
    found = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def room_of(name: str, file: Path) -> str:
    return (name if file.name == "__init__.py" else name.rpartition(".")[0]) or "."


def imported(room: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file of a room imports from the package."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [] if room == "." else room.split(".")
            base = parts[: len(parts) - (node.level - 1)] if node.level > 1 else parts
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".")
                yield name if name in known else module


def test_every_room_has_its_place_and_imports_only_from_those_above() -> None:
    known = modules()
    rooms = {room_of(name, file) for name, file in known.items()}
    assert rooms == HEIGHT.keys(), "LAYERS names every room there is, and no other"
    arrows = set()
    for name, file in known.items():
        room = room_of(name, file)
        for module in imported(room, file, known):
            there = room_of(module, known[module])
            arrows.add((room, there))
            assert there == room or HEIGHT[there] < HEIGHT[room], f"{name} imports {module}"
    assert len(arrows) > 100, "imports were seen"


def test_no_folder_has_too_many_files() -> None:
    for top in (*FOLDERS, "integration"):
        for folder in (ROOT / top, *(d for d in (ROOT / top).rglob("*") if d.is_dir())):
            own = [f for f in folder.iterdir() if f.suffix in (".py", ".c", ".h")]
            assert len(own) <= MOST, f"{folder.relative_to(ROOT)} has {len(own)} files"
