# SPDX-License-Identifier: Apache-2.0
"""The obstacles to a migration. One error reports all of them, each with a remedy."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import Refused, SourceRefused

PreflightFinding = tuple[str, str]
"""(obstacle, remedy): what prevents the move, and what to do about it."""


def refuse(findings: Sequence[PreflightFinding], *, at_source: bool = False) -> None:
    """Raises Refused with all findings, if there are any. A hint that several share appears once.

    ``at_source``: the capsule itself causes some of them; then the error is SourceRefused.
    """
    if findings:
        hints = dict.fromkeys(remedy for _, remedy in findings)
        kind = SourceRefused if at_source else Refused
        raise kind("; ".join(text for text, _ in findings), hint="; ".join(hints))
