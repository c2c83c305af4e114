# SPDX-License-Identifier: Apache-2.0
"""Finds the line of each key and each array element of a TOML document.

The standard library's parser returns values without positions. This one returns positions without
values. ``tomllib`` has accepted the document before, so this parser handles only correct TOML and
reports no errors.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right

Key = tuple[str | int, ...]
"""The position of a value: table and key names, and the index of an array element."""

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_KEY_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|[A-Za-z0-9_-]+')
# A multi-line string may end in up to two quotes of its own before the three that close it.
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})|\'\'\'.*?\'\'\'(?:\'{0,2})|"(?:[^"\\]|\\.)*"|\'[^\']*\'',
    re.DOTALL,
)
_OTHER_SCALAR = re.compile(r"[^,\]}#\n]+")


def key_lines(text: str) -> dict[Key, int]:
    """Map every key path and array element of a valid TOML document to its line, from 1."""
    walk = _Walk(text.replace("\r\n", "\n"))
    walk.document()
    return walk.lines


class _Walk:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Key, int] = {}
        self._newlines = [i for i, c in enumerate(text) if c == "\n"]
        self._last_of: dict[Key, int] = {}  # the current index of each array of tables

    def document(self) -> None:
        table: Key = ()
        while not self._at_end():
            line = self._line()
            if self._take("[["):
                parts = self._dotted()
                array = (*self._resolve(parts[:-1], line), parts[-1])
                self._last_of[array] = index = self._last_of.get(array, -1) + 1
                self.lines.setdefault(array, line)
                table = (*array, index)
                self.lines[table] = line
                self._take("]]")
            elif self._take("["):
                table = self._resolve(self._dotted(), line)
                self.lines[table] = line
                self._take("]")
            else:
                self._pair(table)

    def _pair(self, table: Key) -> None:
        line = self._line()
        key = table
        for part in self._dotted():
            key = (*key, part)
            self.lines.setdefault(key, line)
        self._take("=")
        self._value(key)

    def _value(self, key: Key) -> None:
        self._blank()
        if self._take("["):
            index = 0
            while not self._take("]"):
                self._blank()
                self.lines[(*key, index)] = self._line()
                self._value((*key, index))
                self._take(",")
                index += 1
        elif self._take("{"):
            while not self._take("}"):
                self._blank()
                self._pair(key)
                self._take(",")
        else:
            match = _STRING.match(self.text, self.at) or _OTHER_SCALAR.match(self.text, self.at)
            assert match is not None, f"no value at line {self._line()} of accepted TOML"
            self.at = match.end()

    def _dotted(self) -> tuple[str, ...]:
        parts: list[str] = []
        while not parts or self._take("."):
            self._blank()
            match = _KEY_PART.match(self.text, self.at)
            assert match is not None, f"no key at line {self._line()} of accepted TOML"
            self.at = match.end()
            raw = match.group()
            parts.append(str(tomllib.loads(f"k={raw}")["k"]) if raw[0] in "\"'" else raw)
        return tuple(parts)

    def _resolve(self, parts: tuple[str, ...], line: int) -> Key:
        """A header that names an array of tables means its latest element."""
        key: Key = ()
        for part in parts:
            key = (*key, part)
            self.lines.setdefault(key, line)
            if key in self._last_of:
                key = (*key, self._last_of[key])
        return key

    def _blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _at_end(self) -> bool:
        self._blank()
        return self.at >= len(self.text)

    def _take(self, token: str) -> bool:
        """Step over blanks, and over the token if it comes next; return whether it did."""
        self._blank()
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def _line(self) -> int:
        return bisect_right(self._newlines, self.at - 1) + 1
