# SPDX-License-Identifier: Apache-2.0
"""Parameters that several verbs share, and the functions that complete names for the shell."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..client.context import LAB_ROOT, LAB_ROOT_VARIABLE, LAB_VARIABLE, find, labs

if TYPE_CHECKING:
    from ...runtime.messages import Status

WHICH = "Which cluster"
COMPLETION_S = 0.5  # seconds; a shell that waits longer for a name is no help


class Layout(StrEnum):
    """How a command prints its data."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"


class TableOrJson(StrEnum):
    """How a command prints its data."""

    TABLE = "table"
    JSON = "json"


def _inherited(
    context: typer.Context, parameter: typer.CallbackParam, value: str | None
) -> str | None:
    """Make ``liveshift --lab a status`` mean what ``liveshift status --lab a`` does."""
    return value or context.find_root().params.get(parameter.name or "")


def duration(text: str) -> float:
    """Return the seconds in ``90``, ``90s``, ``1.5m`` or ``2h``; raises BadParameter for all
    else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text.strip())
    if not match:
        raise typer.BadParameter(f'"{text}" is not a duration; write it as 90s, 5m or 1h')
    return float(match[1]) * {"ms": 0.001, None: 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _status(context: typer.Context) -> Status | None:
    """Return the cluster's status; None if it does not answer at once."""
    from ...runtime.messages import GetStatus, Status
    from ..client.client import Client

    given = {**context.find_root().params, **{k: v for k, v in context.params.items() if v}}
    try:
        place = find(given.get("socket"), given.get("lab"), given.get("connect"), given.get("key"))
        with Client(place) as client:
            return client.get(Status, GetStatus(), COMPLETION_S)
    except Exception:
        return None  # a completion cannot report errors


def job_names(context: typer.Context) -> list[tuple[str, str]]:
    status = _status(context)
    return [(job.name, job.command) for job in status.jobs] if status else []


def capsule_names(context: typer.Context) -> list[tuple[str, str]]:
    status = _status(context)
    jobs = status.jobs if status else []
    return [(c.name, f"{c.state} on {c.host}") for job in jobs for c in job.capsules]


def host_names(context: typer.Context) -> list[tuple[str, str]]:
    status = _status(context)
    hosts = status.hosts if status else []
    return [(h.name, f"{h.state}, {h.used} of {h.slots} slots taken") for h in hosts]


def job_and_capsule_names(context: typer.Context) -> list[tuple[str, str]]:
    return [*job_names(context), *capsule_names(context)]


def any_names(context: typer.Context) -> list[tuple[str, str]]:
    return [*job_and_capsule_names(context), *host_names(context)]


def lab_names() -> list[str]:
    return labs(Path(os.environ.get(LAB_ROOT_VARIABLE) or LAB_ROOT))


def lab_host_names(context: typer.Context) -> list[str]:
    from .. import lab

    try:
        name = context.params.get("lab_name") or os.environ.get(LAB_VARIABLE)
        return list(lab.find(name or None).hosts)
    except Exception:
        return []  # a completion cannot report errors


Socket = Annotated[
    str | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="UNIX socket of an orchestrator or agent; else [dim]$LIVESHIFT_SOCKET[/].",
        rich_help_panel=WHICH,
        callback=_inherited,
        show_default=False,
    ),
]
Lab = Annotated[
    str | None,
    typer.Option(
        "--lab",
        metavar="NAME",
        help="A lab on this machine; else [dim]$LIVESHIFT_LAB[/], this machine's own daemon, or"
        " the one lab that runs here.",
        rich_help_panel=WHICH,
        callback=_inherited,
        autocompletion=lab_names,
        show_default=False,
    ),
]
Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="tcp://HOST:PORT",
        help="An orchestrator on another machine, with --key; else [dim]$LIVESHIFT_CONNECT[/].",
        rich_help_panel=WHICH,
        callback=_inherited,
        show_default=False,
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="An operator's key, orchestrator.pub next to it; else [dim]$LIVESHIFT_KEY[/].",
        rich_help_panel=WHICH,
        callback=_inherited,
        show_default=False,
    ),
]
Host = Annotated[
    str, typer.Argument(metavar="HOST", help="Name of the host.", autocompletion=host_names)
]
HostWords = Annotated[
    list[str],
    typer.Argument(metavar="[host] NAME", help="Name of the host.", autocompletion=host_names),
]
Capsule = Annotated[
    str,
    typer.Argument(
        metavar="CAPSULE", help="JOB/NUMBER, such as gpt/1.", autocompletion=capsule_names
    ),
]
Job = Annotated[
    str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=job_names)
]
AsLayout = Annotated[
    Layout, typer.Option("--output", "-o", help="wide has more columns; json is for scripts.")
]
AsTableOrJson = Annotated[TableOrJson, typer.Option("--output", "-o", help="json is for scripts.")]
