# SPDX-License-Identifier: Apache-2.0
"""The requests of agents about device memory. ``key`` is "<migration>/<inner pid>"."""

from __future__ import annotations

from .blocks import Block
from .calls import Change, HelperRequest


class Warm(Change, frozen=True):
    """Prepares contexts on GPUs for a key. Reply: None."""

    key: str
    gpus: list[str]


class Create(Change, frozen=True):
    """Makes memory for blocks under a key. Reply: None."""

    key: str
    blocks: list[Block]


class Drop(Change, frozen=True):
    """Frees a key's memory. Reply: None."""

    key: str


class GetHeld(HelperRequest, frozen=True):
    """Asks how many bytes each key holds. Reply: dict[str, int]."""


class CopyOut(HelperRequest, frozen=True):
    """Copies a key's memory out. No reply: the words of slots.py follow, and then the connection
    ends."""

    key: str


class CopyIn(HelperRequest, frozen=True):
    """Copies bytes into a key's memory. No reply, as for CopyOut."""

    key: str


class Session(HelperRequest, frozen=True):
    """Begins a device session. Reply: None; from then on the connection carries only the session
    (session_client.py)."""

    pid: int
    directory: str
    inner_pid: int
