# SPDX-License-Identifier: Apache-2.0
"""The lines of keys, through all of TOML."""

from __future__ import annotations

import tomllib

from cluster_files import EXAMPLE, paths_in

from liveshift.runtime.config.toml_lines import key_lines

ODD = r'''
a.b."c.d".'e' = 1 # a comment = [
"quo\"ted" = """
not = "a key"
[nor.a.table] \""" still in"""""
lit = \'\'\'
x = 1'\'\'\'
empty = ""
[t] # [u]
when = 1979-05-27 07:32:00
list = [ # first
  1, [2, "]"],
  { x = 1, y.z = ["a"] },
]
[ "t" . "u" ]
k=true
[[many]]
n = 1
[many.sub]
s = 1
[[many]]
n = 2
[[many.deep]]
d = {}
[[many.deep]]
d = []
'''.replace("\\'", "'")


def test_lines_are_found_through_all_of_toml() -> None:
    lines = key_lines(ODD)
    assert set(lines) == paths_in(tomllib.loads(ODD))
    assert key_lines(ODD.replace("\n", "\r\n")) == lines
    text = ODD.split("\n")

    def at(*key: str | int) -> str:
        return text[lines[key] - 1]

    assert at("a", "b", "c.d", "e").startswith("a.b.")
    assert at('quo"ted').startswith('"quo')
    assert at("lit") == "lit = '''"
    assert at("empty") == 'empty = ""'
    assert at("t", "when").startswith("when")
    assert at("t", "list", 1, 1) == '  1, [2, "]"],'
    assert at("t", "list", 2, "y", "z", 0).startswith("  { x")
    assert at("t", "u", "k") == "k=true"
    assert at("many", 1, "n") == "n = 2"
    assert at("many", 1, "deep", 1, "d") == "d = []"


def test_line_of_every_key_in_a_plain_file() -> None:
    text = EXAMPLE.read_text()
    for key, line in key_lines(text).items():
        if not isinstance(key[-1], int):
            assert str(key[-1]) in text.split("\n")[line - 1]
