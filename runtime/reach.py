# SPDX-License-Identifier: Apache-2.0
"""Why a peer at an address is not connected: a look with plain TCP tells causes apart."""

from __future__ import annotations

import asyncio

PROBE_S = 1.0


async def why_not(address: str) -> tuple[str, str]:
    """(cause, what to look at) for HOST:PORT, to which no CURVE connection is up."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            writer = (await asyncio.open_connection(host.strip("[]"), int(port)))[1]
    except ConnectionRefusedError:
        return (
            f"{address} refuses connections: nothing listens there",
            "`systemctl status liveshift-orchestrator` there, and whether its cluster file says"
            f" cluster.orchestrator = {address!r}",
        )
    except TimeoutError:
        return (
            f"{address} does not answer within {PROBE_S:g} s",
            f"a firewall between here and there may drop TCP port {port}, or the machine is down",
        )
    except OSError as error:
        return (
            f"{address} cannot be reached: {error.strerror or error}",
            "the address is cluster.orchestrator in the cluster file; `ip route get` shows the way",
        )
    writer.close()
    return (
        f"{address} is open, and the handshake with it does not come about: it has another key"
        " than public/orchestrator.pub here says, or is no orchestrator",
        "compare public/orchestrator.pub in the key directories of both machines",
    )
