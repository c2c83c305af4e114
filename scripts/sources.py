#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keep the one list of installed files in meson.build equal to what lies in the package folders.

``scripts/sources.py`` rewrites the list between its two markers in place (``make sources``);
``scripts/sources.py --check`` changes nothing, prints the difference, and ends with 1 if there is
one. test_sources.py runs the check, so that no new file can be forgotten in the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDERS = ("criu_glue", "cuda_snapshot", "interposer", "launcher", "runtime")
ROOT_FILES = (
    *("__init__.py", "cores.py", "errors.py", "ptrace.py", "py.typed", "units.py", "waiting.py"),
)
SUFFIXES = frozenset({".py", ".html", ".css", ".js", ".svg", ".service"})
BEGIN = "# sources: begin (rewritten by `make sources`)"
END = "# sources: end"


def wanted(root: Path) -> list[str]:
    """Every file to install, relative to ``root``; the root's own files first, then sorted."""
    found = [name for name in ROOT_FILES if (root / name).is_file()]
    for folder in FOLDERS:
        files = (f for f in (root / folder).rglob("*") if f.is_file() and f.suffix in SUFFIXES)
        found += sorted(f.relative_to(root).as_posix() for f in files)
    return found


def _parts(text: str) -> tuple[str, str, str]:
    """The text before the list, the list and the text after it; raises SystemExit without marks."""
    before, begin, rest = text.partition(BEGIN + "\n")
    inner, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f'meson.build: the marker lines "{BEGIN}" and "{END}" are gone')
    return before + begin, inner, end + after


def listed(text: str) -> list[str]:
    """The files that the text of a meson.build names between its markers."""
    _, inner, _ = _parts(text)
    return [line.strip().rstrip(",").strip("'") for line in inner.splitlines() if line.strip()]


def rewritten(text: str, files: list[str]) -> str:
    """The text of meson.build with ``files`` between the markers."""
    before, _, after = _parts(text)
    indent = before.rpartition(BEGIN)[0].rpartition("\n")[2]
    return before + "".join(f"{indent}'{name}',\n" for name in files) + indent + after


def main(arguments: list[str], root: Path) -> int:
    """Rewrite the list, or with ``--check`` only say what is wrong with it."""
    build = root / "meson.build"
    text = build.read_text()
    have, want = listed(text), wanted(root)
    if arguments == ["--check"]:
        for name in sorted(set(want) - set(have)):
            print(f"meson.build: {name} is not listed and would not be installed")
        for name in sorted(set(have) - set(want)):
            print(f"meson.build: {name} is listed and does not exist")
        if have != want:
            print("run `make sources`", file=sys.stderr)
        return 1 if have != want else 0
    if have != want:
        build.write_text(rewritten(text, want))
        print(f"meson.build: {len(want)} files listed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path(__file__).resolve().parent.parent))
