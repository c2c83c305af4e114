# SPDX-License-Identifier: Apache-2.0
"""Texts of people and hosts, such as reasons and commands, before others read them.

A terminal obeys control characters: a command line could give an operator's window a title, clear
it, or look like another line of the history or of a log.
"""

from __future__ import annotations

import unicodedata

MOST_TEXT = 1000
"""The history and the status have at most this many characters of a reason or of a command."""


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """Return a text as one line of at most ``most`` characters, by default as many as the history
    keeps of a person's."""
    return one_line(text if len(text) <= most else f"{text[:most]}…")


def one_line(text: str) -> str:
    """Return a text with a blank for each line feed and tab, and "?" for what :func:`visible`
    replaces."""
    if text.isprintable():
        return text
    return visible("".join(" " if c.isspace() else c for c in text))


def visible(text: str) -> str:
    """Return a text with "?" for each character that a terminal might obey, and for each byte that
    is no UTF-8. Line feeds and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else "?"
        for c in text
    )
