# SPDX-License-Identifier: Apache-2.0
"""What a target is: a parser, and inputs that it is to begin with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.guard import Place
from liveshift.criu_glue.files.rights import User

logging.disable(logging.CRITICAL)

ROOT = os.geteuid() == 0
ALICE = User(64001, 64001, (64002,)) if ROOT else User(0, 0)
"""Whose the capsule is: rights can only be held against a user by root."""

FINDINGS = Path(__file__).parent / "findings"


@dataclass
class Target:
    """``largest``: bytes of an input."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    largest: int = 4096
    places: list[Place] = field(default_factory=list)

    def corpus(self) -> list[bytes]:
        """Seeds, and every input that once was a finding."""
        kept = sorted((FINDINGS / self.name).glob("*"))
        return [b"", *self.seeds(), *(path.read_bytes() for path in kept)]

    def close(self) -> None:
        for place in self.places:
            place.remove()
