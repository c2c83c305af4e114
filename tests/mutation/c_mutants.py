# SPDX-License-Identifier: Apache-2.0
"""The same for C, token by token: comparisons, ``&&``/``||``, signs, numbers, and whole statements.

What lies outside functions is left alone (a brace in the first column ends one), and comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .python_mutants import Mutant

TOKENS = {
    "==": "!=",
    "!=": "==",
    "<=": "<",
    ">=": ">",
    "&&": "||",
    "||": "&&",
    "<": "<=",
    ">": ">=",
    "+": "-",
    "-": "+",
    "+=": "-=",
    "-=": "+=",
    "true": "false",
    "false": "true",
    "!": "",
}
TOKEN = re.compile(
    r"/\*.*?\*/|\"[^\"]*\"|->|\+\+|--|<<|>>|\+=|-=|==|!=|<=|>=|&&|\|\||\btrue\b|\bfalse\b"
    r"|(?<=[\w)\]] )[<>+-](?= )|!(?=[\w(])|\b\d+\b",
    re.DOTALL,
)
STATEMENT = re.compile(r"^ +(?!return\b|struct\b|u?int|bool\b|enum\b|\})[\w*(].*;$", re.MULTILINE)
FUNCTION = re.compile(
    r"^[^\s{#][^\n{]*\([^\n{]*(?:\n +[^\n{]*)*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)


def mutants(source: str) -> Iterator[Mutant]:
    for body in FUNCTION.finditer(source):
        for found in TOKEN.finditer(source, body.start(1), body.end(1)):
            token = found[0]
            after = str(int(token) + 1) if token.isdigit() else TOKENS.get(token)
            if after is not None:
                yield _mutant(source, found.start(), found.end(), after)
        for found in STATEMENT.finditer(source, body.start(1), body.end(1)):
            begin = found.start() + len(found[0]) - len(found[0].lstrip())
            yield _mutant(source, begin, found.end(), ";")


def _mutant(source: str, start: int, end: int, after: str) -> Mutant:
    line = source.count("\n", 0, start) + 1
    begin, close = source.rfind("\n", 0, start) + 1, source.find("\n", end)
    changed = source[begin:start] + after + source[end:close]
    text = source[:start] + after + source[end:]
    return Mutant(line, source[begin:close].strip(), changed.strip(), text)
