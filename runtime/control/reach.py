# SPDX-License-Identifier: Apache-2.0
"""Finds out with plain TCP why a peer at an address is not connected."""

from __future__ import annotations

import asyncio

from .kernels import connect

PROBE_S = 1.0


async def why_not(address: str) -> tuple[str, str]:
    """Why no CURVE connection to the orchestrator at HOST:PORT is up: (cause, what to look at)."""
    return await why_closed(address) or (
        f"{address} is open, and the handshake with it does not come about: it has another key"
        " than public/orchestrator.pub here says, or is no orchestrator",
        "compare public/orchestrator.pub in the key directories of both machines",
    )


async def why_closed(address: str) -> tuple[str, str] | None:
    """Why plain TCP cannot connect to the orchestrator; None where it can."""
    seen, cause = await _tried(address)
    looks = {
        "refused": "`systemctl status liveshift-orchestrator` there, and whether its cluster file"
        f" says cluster.orchestrator = {address!r}",
        "silent": f"a firewall between here and there may drop TCP port {_port(address)}, or the"
        " machine is down",
        "no way": "the address is cluster.orchestrator in the cluster file; `ip route get` shows"
        " the way",
    }
    return None if seen == "open" else (cause, looks[seen])


async def why_no_agent(host: str, address: str | None) -> tuple[str, str]:
    """Why a host's agent is not connected to the orchestrator here: (cause, what to look at).

    ``address``: where the agent listens for images.
    """
    log = f"on {host}: `systemctl status liveshift-agent`; its log says why"
    if address is None:
        return "its agent has no connection to here", log
    seen, cause = await _tried(address)
    looks = {
        "refused": log,
        "silent": f"{host} may be down, or a firewall may drop TCP port {_port(address)}",
        "no way": f"the address is hosts.{host}.address in the cluster file; `ip route get` shows"
        " the way",
    }
    if seen != "open":
        return cause, looks[seen]
    return (
        f"its agent listens on {address} and has no connection to here",
        f"{log}: a firewall, another address in its cluster.orchestrator, or a key that is not"
        " known here",
    )


async def _tried(address: str) -> tuple[str, str]:
    """The result of a TCP connection (open, refused, silent or no way), and the same in words."""
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await connect(address)
    except ConnectionRefusedError:
        return "refused", f"{address} refuses connections: nothing listens there"
    except TimeoutError:
        return "silent", f"{address} does not answer within {PROBE_S:g} s"
    except OSError as error:
        return "no way", f"{address} cannot be reached: {error.strerror or error}"
    writer.close()
    return "open", f"{address} is open"


def _port(address: str) -> str:
    return address.rpartition(":")[2]
