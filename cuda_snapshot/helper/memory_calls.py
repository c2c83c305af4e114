# SPDX-License-Identifier: Apache-2.0
"""What agents ask of the helper about device memory. ``key`` is "<migration>/<inner pid>"."""

from __future__ import annotations

from .blocks import Block
from .calls import Ask, Change


class Warm(Change, frozen=True):
    """None."""

    key: str
    gpus: list[str]


class Create(Change, frozen=True):
    """None."""

    key: str
    blocks: list[Block]


class Drop(Change, frozen=True):
    """None."""

    key: str


class Held(Ask, frozen=True):
    """dict[str, int]."""


class CopyOut(Ask, frozen=True):
    """No reply: the words of slots.py, and then the end of the connection."""

    key: str


class CopyIn(Ask, frozen=True):
    """As CopyOut."""

    key: str


class Session(Ask, frozen=True):
    """None, and from then on the connection is the session's (session_client.py)."""

    pid: int
    directory: str
    inner_pid: int
