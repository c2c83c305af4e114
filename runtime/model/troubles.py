# SPDX-License-Identifier: Apache-2.0
"""What stands in the way of a move: all of it is told at once, each with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import Refused, SourceRefused

Trouble = tuple[str, str]
"""(what stands in the way, what to do)."""


def refuse(troubles: Sequence[Trouble], *, at_source: bool = False) -> None:
    """Raises Refused with all of them, if there are any; a hint for several is said once.

    ``at_source``: some of them have their cause in the capsule; then it is a SourceRefused.
    """
    if troubles:
        hints = dict.fromkeys(remedy for _, remedy in troubles)
        kind = SourceRefused if at_source else Refused
        raise kind("; ".join(text for text, _ in troubles), hint="; ".join(hints))
