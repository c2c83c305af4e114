# SPDX-License-Identifier: Apache-2.0
"""``liveshift run``: starts a job, and stays with it as a plain command line would."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ... import proc_text
from ...errors import LiveshiftError
from ...runtime.config.choices import RewindOn
from ..show import render
from .options import OpenClient, TableOrJson, duration, with_client

if TYPE_CHECKING:
    from ...runtime.messages import RunJob

START_S = 180.0  # seconds to make a job's sandboxes and networks on every host

EXAMPLES = """\
[bold]Examples[/]

liveshift run -- torchrun --nproc-per-node 2 train.py

liveshift run --nnodes 2 --name gpt -- torchrun --nproc-per-node 1 train.py

liveshift run --nnodes 2 -- python train.py   [dim]# RANK and WORLD_SIZE are set[/]
"""


@with_client
def run(
    open_client: OpenClient,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="[--] COMMAND [ARG]...",
            help="What to run in each capsule, passed through untouched.",
            show_default=False,
        ),
    ],
    nnodes: Annotated[
        int,
        typer.Option(
            "--nnodes",
            "-n",
            min=1,
            metavar="N",
            help="Capsules, each on a host of its own if it can be.",
        ),
    ] = 1,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            help="The job's name; one is made up without it.",
            show_default=False,
        ),
    ] = "",
    collective_timeout: Annotated[
        str,
        typer.Option(
            "--collective-timeout",
            metavar="TIME",
            help="How long the job's ranks wait for each other before they give up, where the"
            " script sets a timeout for its process groups; else the cluster file's"
            " [dim]timeouts.collective[/]. A move is undone well before that.",
            show_default=False,
        ),
    ] = "",
    snapshot_every: Annotated[
        str,
        typer.Option(
            "--snapshot-every",
            metavar="TIME",
            help="Keep an image of the whole job in the memory of another host, and renew it this"
            " often; [dim]auto[/] to let liveshift choose, from what an image costs and how often"
            " hosts fail; [dim]off[/] for none; else the cluster file's [dim]snapshots.every[/].",
            show_default=False,
        ),
    ] = "",
    rewind_on: Annotated[
        RewindOn | None,
        typer.Option(
            "--rewind-on",
            help="Take the job back to its snapshot after a fault, which is a lost host or a rank"
            " that a signal has ended, or after [dim]any[/] exit code other than 0; else the"
            " cluster file's [dim]snapshots.rewind_on[/].",
            show_default=False,
        ),
    ] = None,
    max_rewinds: Annotated[
        int | None,
        typer.Option(
            "--max-rewinds",
            min=0,
            metavar="N",
            help="So often in an hour at most after ranks have ended; lost hosts do not count; else"
            " the cluster file's [dim]snapshots.max_rewinds[/].",
            show_default=False,
        ),
    ] = None,
    env_ranks: Annotated[
        bool,
        typer.Option(
            "--env-ranks",
            help="Set RANK, WORLD_SIZE, MASTER_ADDR and their like with one capsule too.",
        ),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", "-d", help="Print the job's name and return; it goes on by itself."
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Tell of starts and moves even if stderr is no terminal."
        ),
    ] = False,
    output: Annotated[
        TableOrJson,
        typer.Option("--output", "-o", help="json, with --detach: the job's name for scripts."),
    ] = TableOrJson.TABLE,
) -> int:
    """Run a command as a job that can move while it runs.

    With --nnodes 2 or more torchrun gets its nodes from PET_* variables, plain python from RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK; the command of a single capsule gets none
    of them, unless you ask with --env-ranks. The job's output comes here, SIGINT and SIGTERM go
    there (a second SIGINT kills it), and the exit code is the job's. Closing the terminal does not
    end the job. Its standard input is empty.

    Your environment goes along, as the cluster file lets it. Variables that keep a job movable
    (NCCL_HOSTID, NCCL_RAS_ENABLE and others; `liveshift config show` lists them with their reasons)
    are set where you have not set them yourself.
    """
    from ...runtime.messages import Me, Named, WhoAmI
    from ..client import caller
    from . import private_paths
    from .foreground import Foreground

    if output is TableOrJson.JSON and not detach:
        raise typer.BadParameter("-o json goes with --detach: else stdout has the job's output")
    limit, every = _collective_timeout(collective_timeout), _snapshot_every(snapshot_every)
    request = _request(command, nnodes, name, limit, env_ranks, every, rewind_on, max_rewinds)
    with open_client() as client:
        private_paths.check(
            request.argv,
            request.cwd,
            request.env,
            lambda: client.get(Me, WhoAmI()).shared,
            render.note,
        )
        caller.note_stdin(render.note)
        if detach and output is TableOrJson.JSON:
            render.print_json(client.get(Named, request, START_S))
            return 0
        if detach:
            sys.stdout.write(client.get(Named, request, START_S).name + "\n")
            return 0
        return Foreground(client, notices=verbose or sys.stderr.isatty()).run(request, START_S)


def _collective_timeout(text: str) -> float:
    """Return seconds, 0 if nothing is given. Raises BadParameter."""
    seconds = duration(text) if text else 0.0
    if text and not seconds:
        raise typer.BadParameter("--collective-timeout must be longer than 0 s")
    return seconds


def _snapshot_every(text: str) -> float:
    """Return what RunJob.snapshot_every holds, 0 if nothing is given. Raises BadParameter."""
    from ...runtime.messages import SNAPSHOTS_AUTO, SNAPSHOTS_OFF

    if text in ("auto", "off"):
        return SNAPSHOTS_AUTO if text == "auto" else SNAPSHOTS_OFF
    seconds = duration(text) if text else 0.0
    if text and seconds < 1:
        raise typer.BadParameter('--snapshot-every must be 1 s or longer, "auto" or "off"')
    return seconds


def _request(
    command: list[str],
    nnodes: int,
    name: str,
    collective: float,
    env_ranks: bool,
    snapshot_every: float,
    rewind_on: RewindOn | None,
    max_rewinds: int | None,
) -> RunJob:
    from ...runtime.config.environment import remarks
    from ...runtime.messages import RunJob
    from ..client import caller

    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise LiveshiftError(
            "the current directory has been removed", hint="`cd` to one that is there"
        ) from None
    for word in command:
        if not caller.is_text(word):
            raise typer.BadParameter(f"{word!r} in the command is not UTF-8")
    environment = caller.environment(render.note)
    for remark in remarks(environment, ranks=nnodes > 1 or env_ranks):
        render.note(remark)
    return RunJob(
        name=name,
        nnodes=nnodes,
        argv=list(command),
        env=environment,
        cwd=cwd,
        gid=os.getgid(),
        groups=os.getgroups(),
        collective=collective,
        env_ranks=env_ranks,
        snapshot_every=snapshot_every,
        rewind_on=rewind_on.value if rewind_on else "",
        max_rewinds=-1 if max_rewinds is None else max_rewinds,
        umask=_umask(),
    )


def _umask() -> int:
    """The file mode creation mask of this process. umask(2) can only read it by changing it, so we
    read /proc/self/status (proc(5))."""
    for line in proc_text.lines("/proc/self/status"):
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return -1
