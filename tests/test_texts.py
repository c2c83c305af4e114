# SPDX-License-Identifier: Apache-2.0
"""Texts of people and hosts become short lines without anything that a terminal obeys."""

from __future__ import annotations

from liveshift.texts import one_line, shortened, visible


def test_a_persons_text_is_cut_where_the_history_ends_it() -> None:
    assert shortened("x" * 1000) == "x" * 1000
    assert shortened("x" * 1001) == "x" * 1000 + "…"


def test_letters_of_all_languages_stay() -> None:
    text = "Grüße, 日本\u3000語, naïve\u00a0x, ═━✓"
    assert visible(text) == text
    assert visible("two\n\tlines\x1b[2J\udcff") == "two\n\tlines?[2J?"


def test_what_begins_a_new_line_is_a_blank_in_one_line() -> None:
    assert one_line("two\n\tlines\r\u2028\x85!\x00") == "two  lines   !?"
