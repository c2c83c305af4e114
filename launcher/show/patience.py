# SPDX-License-Identifier: Apache-2.0
"""Looks again while the orchestrator is restarted: its migrations go on, so the command waits."""

from __future__ import annotations

import time
from typing import TypeVar

from ...errors import Unreachable
from ...runtime.messages import Message
from ..client.client import Client
from . import render

A = TypeVar("A", bound=Message)

PATIENCE_S = 30.0
AGAIN_S = 0.2


def look(client: Client, answer: type[A], ask: Message, seconds: float = PATIENCE_S) -> A:
    """Return the answer to a request that only reads. Ask again while no daemon answers.

    Says so on stderr once. Raises Unreachable if that lasts for ``seconds``, and what Client.get
    raises otherwise.
    """
    until = time.monotonic() + seconds
    told = False
    while True:
        try:
            return client.get(answer, ask)
        except Unreachable as error:
            if time.monotonic() > until:
                raise
            if not told:
                render.note(f"{error}; looking again", style="yellow")
            told = True
            time.sleep(AGAIN_S)
