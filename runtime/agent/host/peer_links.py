# SPDX-License-Identifier: Apache-2.0
"""Notices that a capsule's peers on other hosts are cut off from it.

The capsule's own connections say so first: a peer does not acknowledge what was sent. A link that
loses packets can look like that for a second. So the peer counts as cut off only if its kernel does
not answer echoes either, from one heartbeat to the next.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass

from ....criu_glue.network.echoes import Echoes
from ....criu_glue.survey.unanswered import missed_answers, unanswered

log = logging.getLogger("liveshift.agent")

LEAST_ECHOES = 2
"""Number of consecutive unanswered echoes after which a peer counts as cut off."""
MOST_PEERS = 16
"""Number of peers that a capsule reports, those that have been silent for longest. In a partition
each capsule may miss hundreds."""


@dataclass(frozen=True)
class _Asked:
    """Number of echoes since the peer's last answer, and when it was first found silent."""

    echoes: int
    since: float


class PeerLinks:
    """The links of one capsule. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._told = False  # what has gone wrong
        self._missed = -1  # as many as there had been at the last call; -1: not known
        self._echoes: Echoes | None = None
        self._asked: dict[str, _Asked] = {}  # by address of a peer

    def heartbeat(self, init: int, subnet: str, *, locked: bool) -> dict[str, float]:
        """By address of a peer that seems cut off: seconds for which it has answered nothing.

        ``init``: process 1 of the capsule, as the host sees it. ``subnet``: that of its job.
        ``locked``: its own network is locked, or about to be. An echo that was sent at one call has
        until the next one to be answered. Never raises: a heartbeat says more than this.
        """
        with self._lock:
            try:
                if not (locked or self._ended):
                    return self._silent_peers(init, subnet)
            except Exception as error:
                # A process that has ended has no namespaces, though it may still be listed.
                if os.path.exists(f"/proc/{init}/ns/net") and not self._told:
                    self._told = True
                    log.warning("the links of process %d are not known", init, exc_info=error)
            self._forget()
            return {}

    def end(self) -> None:
        """Close what is open in the capsule's network namespace, which would outlive the capsule.
        May be repeated."""
        with self._lock:
            self._ended = True
            self._forget()

    def _silent_peers(self, init: int, subnet: str) -> dict[str, float]:
        before, self._missed = self._missed, missed_answers(init)
        if self._missed == before and not self._asked:
            return {}
        waiting = unanswered(init, subnet)
        if not waiting:
            self._close()
            return {}
        now = time.monotonic()
        if self._echoes is None:
            self._echoes = Echoes(init)
        answered = self._echoes.answered()
        known = {a: asked for a, asked in self._asked.items() if a not in answered}
        earlier = {a: known.get(a, _Asked(0, now)) for a in waiting}
        self._echoes.send(waiting)
        self._asked = {a: _Asked(asked.echoes + 1, asked.since) for a, asked in earlier.items()}
        silent = {
            address: max(waiting[address], now - asked.since)
            for address, asked in earlier.items()
            if asked.echoes >= LEAST_ECHOES
        }
        # In an order that does not change from one heartbeat to the next.
        first = sorted(silent, key=lambda address: (earlier[address].since, address))
        return {address: silent[address] for address in first[:MOST_PEERS]}

    def _forget(self) -> None:
        self._missed = -1
        self._close()

    def _close(self) -> None:
        echoes, self._echoes = self._echoes, None
        self._asked = {}
        if echoes is not None:
            echoes.close()
