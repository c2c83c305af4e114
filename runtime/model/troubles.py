# SPDX-License-Identifier: Apache-2.0
"""The obstacles to a move. One error reports all of them, each with a remedy."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import Refused, SourceRefused

Trouble = tuple[str, str]
"""(obstacle, remedy): what prevents the move, and what to do about it."""


def refuse(troubles: Sequence[Trouble], *, at_source: bool = False) -> None:
    """Raises Refused with all troubles, if there are any. A hint that several share appears once.

    ``at_source``: the capsule itself causes some of them; then the error is SourceRefused.
    """
    if troubles:
        hints = dict.fromkeys(remedy for _, remedy in troubles)
        kind = SourceRefused if at_source else Refused
        raise kind("; ".join(text for text, _ in troubles), hint="; ".join(hints))
