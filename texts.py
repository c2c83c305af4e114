# SPDX-License-Identifier: Apache-2.0
"""Texts of people and hosts, such as reasons and commands, before others read them."""

from __future__ import annotations

MOST_TEXT = 1000
"""The history and the status have at most this many characters of a reason or of a command."""


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """Cut a text to ``most`` characters, by default to what the history keeps of a person's."""
    return text if len(text) <= most else f"{text[:most]}…"
