# SPDX-License-Identifier: Apache-2.0
"""Requests to agents that end as soon as the agent's host is no longer up."""

from __future__ import annotations

import asyncio

from ...errors import Unreachable
from ..control.link import Switchboard
from ..messages import Message
from ..messages.request_text import request_to
from .fleet import Fleet

LIVENESS_CHECK_S = 0.5
"""While a request waits, the orchestrator checks this often whether the host is up."""


class Agents:
    """The orchestrator has one instance, through which most of its parts send requests to agents.
    The ``switchboard`` alone could wait for the whole timeout, also for a host that ``fleet`` no
    longer counts as up."""

    def __init__(self, fleet: Fleet, switchboard: Switchboard) -> None:
        self._fleet = fleet
        self._switchboard = switchboard

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        """Send a request to a host and return the answer. Raises what the agent raised, and
        Unreachable as soon as the host is no longer up, or at the timeout."""
        answer = asyncio.ensure_future(self._switchboard.request(host, message, timeout))
        try:
            while not (await asyncio.wait({answer}, timeout=LIVENESS_CHECK_S))[0]:
                if not self._fleet.is_up(host):
                    raise Unreachable(f"{host} stopped answering during {request_to(message)}")
            return answer.result()
        finally:
            answer.cancel()  # asyncio.wait() leaves it when we are cancelled
