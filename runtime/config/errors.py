# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a cluster file. One error names all: the place, the value, and what was expected."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import ConfigError
from .toml_lines import Key

NOTHING = object()
"""A marker for a value that is absent."""

_AT_LINE = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)
_AT_END = re.compile(r"(.*) \(at end of document\)", re.DOTALL)


@dataclass(frozen=True)
class Mistake:
    """One wrong value. ``line`` counts from 1; None for a value that came from no file."""

    line: int | None
    key: str
    found: str
    expected: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{key}found {self.found}, expected {self.expected}"


class WrongCluster(ConfigError):
    """A cluster that cannot be used; ``mistakes`` holds all mistakes, in the order of lines."""

    def __init__(self, mistakes: Iterable[Mistake], *, file: str | None = None) -> None:
        self.mistakes = tuple(sorted(mistakes, key=lambda m: m.line or 0))
        count = len(self.mistakes)
        super().__init__(
            "\n".join(f"{file}:{m.line or 1}: {m}" if file else str(m) for m in self.mistakes),
            hint=(f"{count} mistakes; " if count > 1 else "")
            + "docs/cluster.example.toml shows every key with its default",
        )


def shown(value: object) -> str:
    """The value in TOML's spelling, shortened when long."""
    if value is NOTHING:
        return "nothing"
    if isinstance(value, dict) and value:
        return "a table"
    if isinstance(value, float):
        return repr(value)
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:  # an int of more than 4300 digits has no str()
        return "a number with more than 4300 digits"
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:56]} …"


def dotted(key: Key) -> str:
    """A key as the file writes it: ``hosts.h0.slots`` or ``files.shared[1]``."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = re.fullmatch(r"[A-Za-z0-9_-]+", part)
            text += ("." if text else "") + (part if plain else json.dumps(part))
    return text


def syntax_mistake(text: str, error: tomllib.TOMLDecodeError) -> Mistake:
    """The error of the TOML parser as a mistake. The parser stops at the first error."""
    lines = text.rstrip().split("\n")
    if match := _AT_LINE.fullmatch(str(error)):
        why, line, place = match[1], int(match[2]), f" at column {match[3]}"
    elif match := _AT_END.fullmatch(str(error)):
        why, line, place = match[1], len(lines), " at the end of the file"
    else:
        why, line, place = str(error), 1, ""
    seen = _shortened(lines[line - 1].strip()) if line <= len(lines) else ""
    return Mistake(line, "", seen or "an empty line", f"correct TOML: {why}{place}")
