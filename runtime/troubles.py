# SPDX-License-Identifier: Apache-2.0
"""What stands in the way of a move: all of it is told at once, each with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Refused

Trouble = tuple[str, str]
"""(what stands in the way, what to do)."""


def refuse(troubles: Sequence[Trouble]) -> None:
    """Raises Refused with all of them, if there are any; a hint for several is said once."""
    if troubles:
        hints = dict.fromkeys(remedy for _, remedy in troubles)
        raise Refused("; ".join(text for text, _ in troubles), hint="; ".join(hints))
