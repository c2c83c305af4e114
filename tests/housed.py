# SPDX-License-Identifier: Apache-2.0
"""Capsules of a host, as far as those are asked who look at their memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    job: str
    name: str


@dataclass(frozen=True)
class Overlay:
    vni: int


@dataclass(frozen=True)
class Room:
    """Its tree is what ``init`` has started."""

    init: int
    stands: bool = True

    def alive(self) -> bool:
        return self.stands


@dataclass(frozen=True)
class Resident:
    spec: Spec
    room: Room
    code: int | None = None
    overlay: Overlay = Overlay(7)
