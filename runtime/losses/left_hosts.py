# SPDX-License-Identifier: Apache-2.0
"""Remembers for a while which hosts jobs have left because of their links."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TypeVar

Pair = tuple[str, str]
"""Two hosts, in the order of their names."""

AVOIDED_S = 600.0
"""Seconds for which a host that was left comes last where capsules are to go or images to be held:
nothing says when its links are mended."""


T = TypeVar("T")


class LeftHosts:
    """What an orchestrator remembers until it ends."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}  # by host: when
        self._pairs: dict[Pair, float] = {}  # hosts that did not reach each other: when

    def note(self, hosts: Collection[str], pairs: Collection[Pair]) -> None:
        """Note that a job leaves these hosts, because the links of these pairs are cut."""
        now = time.monotonic()
        self._left = {h: self._left[h] for h in self.recent()} | dict.fromkeys(hosts, now)
        self._pairs = {p: self._pairs[p] for p in self.pairs()} | dict.fromkeys(pairs, now)

    def recent(self) -> set[str]:
        """The hosts that were left lately."""
        return _recent(self._left)

    def pairs(self) -> set[Pair]:
        """The pairs whose links were cut lately."""
        return _recent(self._pairs)


def _recent(noted: dict[T, float]) -> set[T]:
    now = time.monotonic()
    return {each for each, when in noted.items() if now - when < AVOIDED_S}
