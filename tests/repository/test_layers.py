# SPDX-License-Identifier: Apache-2.0
"""The folders of the package: which may import which. And how many files a folder may have, there,
in integration/ and in tests/."""

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
    ("runtime.losses",),
    ("runtime.agent.host", "runtime.migration"),
    ("runtime.agent.gpu", "runtime.quiesce", "runtime.snapshot"),
    ("runtime.agent.departure", "runtime.fleet"),
    ("runtime.agent.arrival", "runtime.moves"),
    ("runtime.agent.holding", "runtime.protection"),
    ("runtime.agent", "runtime.orchestrator"),
    ("launcher.client", "launcher.report"),
    ("launcher.lab", "launcher.show"),
    ("launcher.checks",),
    ("launcher.commands",),
    ("launcher",),
)
"""Each folder imports from itself and from folders in the lines above its own. So no line imports
from the same line, and nothing imports upwards."""

HEIGHT = {folder: height for height, layer in enumerate(LAYERS) for folder in layer}


def modules() -> dict[str, Path]:
    """By dotted name within the package; a folder's ``__init__`` has the folder's name."""
    files = [*ROOT.glob("*.py"), *(f for top in FOLDERS for f in (ROOT / top).rglob("*.py"))]
    found = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def folder_of(name: str, file: Path) -> str:
    return (name if file.name == "__init__.py" else name.rpartition(".")[0]) or "."


def imported(folder: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file of a folder imports from the package."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [] if folder == "." else folder.split(".")
            base = parts[: len(parts) - (node.level - 1)] if node.level > 1 else parts
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".")
                yield name if name in known else module


def test_every_folder_has_its_place_and_imports_only_from_those_above() -> None:
    known = modules()
    folders = {folder_of(name, file) for name, file in known.items()}
    assert folders == HEIGHT.keys(), "LAYERS names every folder there is, and no other"
    arrows = set()
    for name, file in known.items():
        folder = folder_of(name, file)
        for module in imported(folder, file, known):
            there = folder_of(module, known[module])
            arrows.add((folder, there))
            assert there == folder or HEIGHT[there] < HEIGHT[folder], f"{name} imports {module}"
    assert len(arrows) > 100, "imports were seen"


def test_no_folder_has_too_many_files() -> None:
    for top in (*FOLDERS, "integration", "tests"):
        for folder in (ROOT / top, *(d for d in (ROOT / top).rglob("*") if d.is_dir())):
            if folder.is_relative_to(ROOT / "tests/doubles"):
                continue  # they mirror interfaces of others, call by call
            own = [f for f in folder.iterdir() if f.suffix in (".py", ".c", ".h")]
            assert len(own) <= MOST, f"{folder.relative_to(ROOT)} has {len(own)} files"
