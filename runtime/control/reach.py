# SPDX-License-Identifier: Apache-2.0
"""Why a peer at an address is not connected: a look with plain TCP tells causes apart."""

from __future__ import annotations

import asyncio

PROBE_S = 1.0


async def why_not(address: str) -> tuple[str, str]:
    """(cause, what to look at) for the orchestrator's HOST:PORT, to which no CURVE connection is
    up."""
    return await why_closed(address) or (
        f"{address} is open, and the handshake with it does not come about: it has another key"
        " than public/orchestrator.pub here says, or is no orchestrator",
        "compare public/orchestrator.pub in the key directories of both machines",
    )


async def why_closed(address: str) -> tuple[str, str] | None:
    """The same, None where a plain TCP connection comes about."""
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
    """(cause, what to look at) for a host whose agent has no connection to the orchestrator here;
    ``address``: where it listens for images."""
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
    """What came of a TCP connection: open, refused, silent or no way; and that in words."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            writer = (await asyncio.open_connection(host.strip("[]"), int(port)))[1]
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
