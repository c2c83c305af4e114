# SPDX-License-Identifier: Apache-2.0
"""``liveshift agent`` and ``liveshift orchestrator``: run the daemons in the foreground.

systemd runs them so (launcher/systemd/), and the lab too. They end on SIGTERM and SIGINT. Capsules
go on, and the next agent finds them again.
"""

from __future__ import annotations

import gc
import os
import socket as sockets
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

CONFIG = Path("/etc/liveshift/cluster.toml")

Config = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The cluster file.")]
OwnHost = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="NAME",
        help="Which host of the cluster file this is; without it, the one named as this"
        " machine up to the first dot.",
        show_default=False,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log every step: level DEBUG instead of INFO.")
]


def agent(config: Config = CONFIG, host: OwnHost = "", verbose: Verbose = False) -> None:
    """Run this host's agent: it holds the capsules here and moves them. Needs root."""
    with _modules_that_stay():
        from ...runtime.agent import agent as daemon
        from ...runtime.config.cluster import load
        from ...runtime.daemon.cluster_file import ClusterFile

    cluster = load(config)
    name = cluster.host(host or sockets.gethostname().partition(".")[0]).name
    _serve(daemon.serve(cluster, name, ClusterFile(config, cluster)), verbose)


def orchestrator(config: Config = CONFIG, verbose: Verbose = False) -> None:
    """Run the cluster's orchestrator: jobs, spares, taints, migrations, the journal."""
    with _modules_that_stay():
        from ...runtime.config.cluster import load
        from ...runtime.daemon.cluster_file import ClusterFile
        from ...runtime.orchestrator import orchestrator as daemon

    cluster = load(config)
    _serve(daemon.serve(cluster, ClusterFile(config, cluster)), verbose)


@contextmanager
def _modules_that_stay() -> Iterator[None]:
    """Keep Python's collector of cycles from looking through hundreds of modules again and again
    while they are imported, and from then on: a daemon never drops one."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _serve(daemon: Coroutine[None, None, None], verbose: bool) -> None:
    """Run a daemon until a signal ends it. If its cluster file has changed, start it again.

    Raises what the daemon raises.
    """
    import asyncio
    import contextlib
    import logging
    import signal

    from ...runtime.daemon import notify
    from ...runtime.daemon.cluster_file import start_again
    from ...runtime.daemon.log_lines import LogLines

    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(
        LogLines(
            "%(levelname)s %(name)s: %(message)s"
            if os.environ.get("JOURNAL_STREAM")  # systemd's journal adds the time
            else "%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
    )
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=level, handlers=[to_stderr])

    async def until_signalled() -> bool:
        """Return whether the daemon must start again."""
        task = asyncio.ensure_future(daemon)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task
            return True
        notify.stopping()
        return False

    if asyncio.run(until_signalled()):
        start_again()
