# SPDX-License-Identifier: Apache-2.0
"""``liveshift doctor``: its place on the command line (launcher/checks/doctor.py does the work)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .daemons import CONFIG as CLUSTER_FILE
from .options import AsTableOrJson, TableOrJson


def doctor(
    output: AsTableOrJson = TableOrJson.TABLE,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Look at what this cluster file says: its CRIU, GPU libraries, deadlines, the"
            " address that images go to, keys, ports of the other machines, shared paths; else"
            f" [dim]{CLUSTER_FILE}[/] where there is one.",
            show_default=False,
        ),
    ] = None,
    criu: Annotated[
        str | None,
        typer.Option(
            "--criu",
            metavar="PATH",
            help="Look at this CRIU; else [dim]$LIVESHIFT_CRIU[/], then the usual places.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Check whether this machine can run and move jobs, and say what to do if not.

    Kernel features, CRIU, namespaces, VXLAN, nftables, privileges, GPU driver, and whether the
    machine is quick enough for the deadlines; with a cluster file also this machine's keys, the way
    to the others, whether all use the same file, and shared paths. Exit code 1 when a training job
    on CPUs cannot be moved here.
    """
    from ..checks import doctor as examination

    reading = None
    if config is None and CLUSTER_FILE.exists():
        config = CLUSTER_FILE
    if config is not None:
        from ...runtime.config.cluster import read

        reading = read(config)
        path = reading.cluster.paths.criu
        criu = criu or (str(path) if path else None)
    return examination.doctor(output.value, criu, reading)
