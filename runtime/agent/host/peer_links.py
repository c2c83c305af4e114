# SPDX-License-Identifier: Apache-2.0
"""Notices that a capsule's peers on other hosts are cut off from it.

The capsule's own connections say so first: a peer does not acknowledge what was sent. A link that
loses packets can look like that for a second. So the peer counts as cut off only if its kernel does
not answer echoes either, from one heartbeat to the next.
"""

from __future__ import annotations

import contextlib
import time

from ....criu_glue.network.echoes import Echoes
from ....criu_glue.survey.unanswered import timeouts, unanswered

LEAST = 2
"""So many echoes in a row must be unanswered."""
REST = 100
"""A look at all connections that finds nothing is followed by a rest of so many times its duration:
a program may lose packets all the time on its way to a host outside of the cluster."""


class PeerLinks:
    """The links of one capsule."""

    def __init__(self) -> None:
        self._timeouts = -1  # as many as there had been at the last call
        self._rests_until = 0.0
        self._echoes: Echoes | None = None
        self._asked: dict[str, int] = {}  # by address: echoes since its last answer

    def heartbeat(self, init: int, subnet: str, *, still: bool) -> dict[str, float]:
        """By address of a peer that seems cut off: seconds for which it has answered nothing.

        ``init``: process 1 of the capsule, as the host sees it. ``subnet``: that of its job.
        ``still``: its own network is locked, or about to be. An echo that was sent at one call has
        until the next one to be answered.
        """
        if still:
            self.close()
            return {}
        began = time.monotonic()
        if began < self._rests_until:
            return {}
        before, self._timeouts = self._timeouts, timeouts(init)
        if self._timeouts == before and not self._asked:
            return {}
        waiting = unanswered(init, subnet)
        if not waiting:
            now = time.monotonic()
            self._rests_until = now + REST * (now - began)
            self.close()
            return {}
        try:
            return self._ask(init, waiting)
        except OSError:  # the capsule has just ended
            return {}

    def _ask(self, init: int, waiting: dict[str, float]) -> dict[str, float]:
        if self._echoes is None:
            self._echoes = Echoes(init)
        answered = self._echoes.answered()
        before = {a: n for a, n in self._asked.items() if a in waiting and a not in answered}
        self._echoes.ask(waiting)
        self._asked = {address: before.get(address, 0) + 1 for address in waiting}
        return {address: waiting[address] for address, n in before.items() if n >= LEAST}

    def close(self) -> None:
        """Close what is open in the capsule's network namespace, which would outlive the capsule.
        May be repeated."""
        echoes, self._echoes = self._echoes, None
        self._asked.clear()
        if echoes is not None:
            with contextlib.suppress(OSError):
                echoes.close()
