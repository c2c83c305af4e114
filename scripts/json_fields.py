#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write docs/json.md: every field that a command prints with ``-o json``, from the types
(and where a command has none, from json_records.py).

``scripts/json_fields.py`` writes it (``make docs``), ``--check`` ends with 1 if it is not as the
installed package would have it. tests/repository/test_json_fields.py runs the check.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import json_records as records
import msgspec

from liveshift.launcher.show.output_lines import OutputLine
from liveshift.runtime import messages

PAGE = Path(__file__).resolve().parents[1] / "docs/json.md"

COMMANDS: dict[str, tuple[str, type]] = {
    "status": ("one object", messages.Status),
    "events [JOB|HOST]": ("a list of", messages.Event),
    "events mN": ("one object", messages.MigrationRow),
    "logs": ("for each line one object", OutputLine),
    "migrate": ("one object", messages.MigrationRow),
    "migrate --dry-run": ("one object", messages.Planned),
    "inspect": ("`capsules`, a list of", messages.Inspection),
    "drain": ("one object", records.Drained),
    "drain --dry-run": ("one object", records.DrainPlan),
    "taint": ("one object", records.Tainted),
    "run --detach": ("one object", messages.Named),
    "snapshot": ("one object", records.Saved),
    "suspend": ("one object", records.Suspended),
    "resume": ("one object", records.Resumed),
    "rewind": ("one object", records.Rewound),
    "stop": ("one object", records.Stopped),
    "doctor": ("one object", records.Examined),
    "config validate": ("one object", records.Validated),
    "config show": ("one object", records.Configuration),
    "keys list": ("a list of", records.KeyEntry),
    "host add": ("one object", records.Changed),
    "host remove": ("one object", records.Changed),
    "lab list": ("a list of", records.LabRow),
    "whoami": ("one object", messages.Me),
}

HEAD = """\
# What `-o json` prints

Made by `make docs` from the types that the commands print; a test compares them. Times are seconds
since the epoch, durations seconds, sizes bytes, rates bytes a second, unless a field's words say
otherwise. Fields may be added in any version, so ignore those you do not know. One is removed or
changed with a new second number of the version only, and CHANGELOG.md says so.

| command | prints |
|---|---|
"""


def page() -> str:
    """The whole page."""
    text = HEAD
    for command, (how, kind) in COMMANDS.items():
        shown = command.replace("|", "\\|")
        text += f"| `liveshift {shown} -o json` | {how} [{kind.__name__}](#{_anchor(kind)}) |\n"
    for kind in _reachable([kind for _, kind in COMMANDS.values()]):
        text += f"\n## {kind.__name__}\n\n{_words(kind)}| field | type |\n|---|---|\n"
        for name, annotation in _fields(kind).items():
            text += f"| `{name}` | {_shown(annotation)} |\n"
    return text


def _fields(kind: type) -> dict[str, object]:
    """Name → type of a msgspec structure's fields, or of a dataclass's."""
    if dataclasses.is_dataclass(kind):
        return {f.name: typing.get_type_hints(kind)[f.name] for f in dataclasses.fields(kind)}
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _is_record(annotation: object) -> TypeGuard[type]:
    return isinstance(annotation, type) and (
        issubclass(annotation, msgspec.Struct) or dataclasses.is_dataclass(annotation)
    )


def _reachable(kinds: list[type]) -> list[type]:
    """These types and those of their fields, each once, users before what they use."""
    found: list[type] = []
    for kind in kinds:
        if kind not in found:
            found.append(kind)
    for kind in found:  # which grows meanwhile
        for annotation in _fields(kind).values():
            found += [used for used in _records(annotation) if used not in found]
    return found


def _records(annotation: object) -> Iterator[type]:
    if _is_record(annotation):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _records(part)


def _shown(annotation: object) -> str:
    """A type as JSON has it; structures are links."""
    parts = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is types.NoneType else _shown(part) for part in parts)
    if origin is list:
        return f"list of {_shown(parts[0])}"
    if origin is tuple:
        inner = [part for part in parts if part is not ...]
        return (
            f"list of {_shown(inner[0])}" if ... in parts else f"[{', '.join(map(_shown, inner))}]"
        )
    if origin is dict:
        return f"object of {_shown(parts[1])} by {_shown(parts[0])}"
    if origin is typing.Annotated:
        return _shown(parts[0])
    if _is_record(annotation):
        return f"[{annotation.__name__}](#{_anchor(annotation)})"
    if isinstance(annotation, type):
        plain = {str: "string", int: "integer", float: "number", bool: "true or false"}
        plain[object] = "anything"
        return plain.get(annotation, "string")
    return "anything"


def _words(kind: type) -> str:
    """The type's own docstring, if it has one."""
    own = kind.__doc__ or ""
    text = "" if own.startswith(f"{kind.__name__}(") else inspect.cleandoc(own)
    text = text.replace("``", "`")
    return f"{text}\n\n" if text else ""


def _anchor(kind: type) -> str:
    return kind.__name__.lower()


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` only compare it."""
    wanted = page()
    if arguments == ["--check"]:
        if PAGE.read_text() != wanted:
            print(f"{PAGE.name} is not up to date: run `make docs`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
