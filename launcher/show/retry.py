# SPDX-License-Identifier: Apache-2.0
"""Sends a request again while the orchestrator is restarted. Migrations go on after the restart, so
the command waits for it."""

from __future__ import annotations

import time
from typing import TypeVar

from ...errors import Unreachable
from ...runtime.messages import Message
from ..client.client import Client
from . import render

A = TypeVar("A", bound=Message)

RETRY_S = 30.0
AGAIN_S = 0.2


def request(client: Client, answer: type[A], message: Message, seconds: float = RETRY_S) -> A:
    """Return the answer to a request that only reads. Send it again while no daemon answers.

    Says so on stderr once. Raises Unreachable if that lasts for ``seconds``, and what Client.get
    raises otherwise.
    """
    until = time.monotonic() + seconds
    noted = False
    while True:
        try:
            return client.get(answer, message)
        except Unreachable as error:
            if time.monotonic() > until:
                raise
            if not noted:
                render.note(f"{error}; looking again", style="yellow")
            noted = True
            time.sleep(AGAIN_S)
