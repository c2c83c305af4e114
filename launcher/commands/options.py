# SPDX-License-Identifier: Apache-2.0
"""Parameters that several verbs share, and the functions that complete names for the shell."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...errors import no_such
from ..client.context import LAB_ROOT, LAB_ROOT_VARIABLE, LAB_VARIABLE, find, labs

if TYPE_CHECKING:
    from ...runtime.messages import Status
    from ..client.client import Client

T = TypeVar("T")
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


class TextOrJson(StrEnum):
    """How a command prints what is text in itself, such as output."""

    TEXT = "text"
    JSON = "json"


def _inherited(
    context: typer.Context, parameter: typer.CallbackParam, value: str | None
) -> str | None:
    """Make ``liveshift --lab a status`` mean what ``liveshift status --lab a`` does."""
    return value or context.find_root().params.get(parameter.name or "")


def duration(text: str) -> float:
    """Return the seconds in ``90``, ``90s``, ``1.5m`` or ``2h``; raises BadParameter for all
    else."""
    from ...runtime.config.values import read_duration

    try:
        return read_duration(text.strip())
    except ValueError:
        hint = "write it as 90s, 5m or 1h"
        raise typer.BadParameter(f'"{text}" is not a duration; {hint}') from None


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


def _which(name: str, metavar: str, text: str, names: Callable[[], list[str]] | None = None) -> Any:
    return typer.Option(
        name,
        metavar=metavar,
        help=text,
        rich_help_panel=WHICH,
        callback=_inherited,
        autocompletion=names,
        show_default=False,
    )


SOCKET = "UNIX socket of an orchestrator or agent; else [dim]$LIVESHIFT_SOCKET[/]."
LAB = (
    "A lab on this machine; else [dim]$LIVESHIFT_LAB[/], this machine's own daemon, or the one lab"
    " that runs here."
)
CONNECT = "An orchestrator on another machine, with --key; else [dim]$LIVESHIFT_CONNECT[/]."
KEY = "An operator's key, orchestrator.pub next to it; else [dim]$LIVESHIFT_KEY[/]."

Socket = Annotated[str | None, _which("--socket", "PATH", SOCKET)]
Lab = Annotated[str | None, _which("--lab", "NAME", LAB, lab_names)]
Connect = Annotated[str | None, _which("--connect", "tcp://HOST:PORT", CONNECT)]
Key = Annotated[str | None, _which("--key", "FILE", KEY)]
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


def capsules_of(client: Client, name: str, *, ended: bool = True) -> list[str]:
    """Return the capsules that CAPSULE or JOB means, of a job those that have ended only if
    ``ended``. Raises NotFound for an unknown job."""
    from ...runtime.messages import GetStatus, Status

    if "/" in name:
        return [name]  # the daemon knows whether there is one
    jobs = client.get(Status, GetStatus()).jobs
    for job in jobs:
        if job.name == name:
            return [c.name for c in job.capsules if ended or c.state != "ended"]
    raise no_such(f'no job "{name}"', name, (job.name for job in jobs), "there are")


OpenClient = Callable[[], "Client"]


def with_client(verb: Callable[..., T]) -> Callable[..., T]:
    """Give a verb the options that say which cluster is meant, after its own.

    Its first parameter, ``open_client``, finds that cluster and returns a client for it. It raises
    what :func:`find` raises, so a verb calls it once its own options are checked.
    """

    def asked(
        socket: Socket = None, lab: Lab = None, connect: Connect = None, key: Key = None, **own: Any
    ) -> T:
        def open_client() -> Client:
            from ..client.client import Client

            return Client(find(socket, lab, connect, key))

        return verb(open_client, **own)

    # typer takes the options of a command from its signature.
    *which, _ = inspect.signature(asked, eval_str=True).parameters.values()
    _, *own = inspect.signature(verb, eval_str=True).parameters.values()
    vars(asked)["__signature__"] = inspect.Signature([*own, *which])
    asked.__name__, asked.__doc__ = verb.__name__, verb.__doc__
    return asked
