# SPDX-License-Identifier: Apache-2.0
"""The ``liveshift`` command line: all verbs, and the one place where errors become exit codes.

Exit codes: 0 done · 1 tried and failed · 2 wrong usage · 3 wrong cluster file · 4 no such job,
capsule or host · 5 refused, nothing changed · 6 no answer · 7 not permitted · 124 ``--timeout`` or
the deadline has passed (``drain``, ``taint``, ``migrate``) · 130 interrupted. ``run`` ends with the
exit code of its job.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from .. import __version__
from ..errors import LiveshiftError
from .commands import (
    cancel,
    cluster_cmd,
    daemons,
    doctor_cmd,
    drain,
    events,
    inspect_cmd,
    install_units,
    lab_cmd,
    logs,
    migrate,
    rewind,
    run,
    snapshot,
    status,
    stop,
    suspend,
    taint,
    whoami,
)
from .commands.options import Connect, Key, Lab, Socket
from .show import help_pages, render

DEBUG_VARIABLE = "LIVESHIFT_DEBUG"

JOBS, HOSTS, LABS, CLUSTER, OTHER = "Jobs", "Hosts", "This machine", "A real cluster", "Other"
ORDER = (
    *("run", "status", "logs", "inspect", "migrate", "cancel", "events"),
    *("snapshot", "suspend", "resume", "rewind", "stop"),
    *("cordon", "drain", "taint", "uncordon", "untaint"),
    *("lab", "doctor"),
    *("host", "config", "keys", "install-units", "agent", "orchestrator"),
    *("whoami", "version"),
)

FIRST_STEPS = """\
[bold]First steps[/]

sudo liveshift lab up --hosts 3   [dim]# three virtual hosts on this machine[/]

liveshift run --nnodes 2 --name gpt -- torchrun --nproc-per-node 1 train.py

liveshift drain h1   [dim]# meanwhile: gpt/1 moves to the spare, and trains on[/]
"""

app = typer.Typer(
    name="liveshift",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": help_pages.HELP_OPTIONS},
)

app.command(
    rich_help_panel=JOBS,
    epilog=run.EXAMPLES,
    context_settings={"allow_interspersed_args": False},
)(run.run)
app.command(rich_help_panel=JOBS, epilog=status.EXAMPLES)(status.status)
app.command(rich_help_panel=JOBS, epilog=logs.EXAMPLES)(logs.logs)
app.command(
    rich_help_panel=JOBS,
    epilog=inspect_cmd.EXAMPLES,
    short_help="Show device memory, streams and communicators of a job.",
)(inspect_cmd.inspect)
app.command(
    rich_help_panel=JOBS,
    epilog=migrate.EXAMPLES,
    short_help="Move one capsule to another host or GPU while it runs.",
)(migrate.migrate)
app.command(
    rich_help_panel=JOBS,
    epilog=cancel.EXAMPLES,
    short_help="Cancel a move: the capsule stays where it is.",
)(cancel.cancel)
app.command(
    rich_help_panel=JOBS,
    epilog=events.EXAMPLES,
    short_help="Show the history: who asked for what, how it ended.",
)(events.events)
app.command(
    rich_help_panel=JOBS,
    epilog=snapshot.EXAMPLES,
    short_help="Save a snapshot of a whole job; it trains on.",
)(snapshot.snapshot)
app.command(
    rich_help_panel=JOBS,
    epilog=suspend.SUSPEND_EXAMPLES,
    short_help="Let a whole job leave its hosts; nothing is lost.",
)(suspend.suspend)
app.command(
    rich_help_panel=JOBS,
    epilog=suspend.RESUME_EXAMPLES,
    short_help="Let a suspended or saved job go on.",
)(suspend.resume)
app.command(
    rich_help_panel=JOBS,
    epilog=rewind.EXAMPLES,
    short_help="Take a job back to its newest snapshot.",
)(rewind.rewind)
app.command(rich_help_panel=JOBS, short_help="End a job.")(stop.stop)

app.command(
    rich_help_panel=HOSTS,
    epilog=taint.EXAMPLES,
    short_help="Move everything off a host; do not wait.",
)(taint.taint)
app.command(rich_help_panel=HOSTS, short_help="Take a host's taint back.")(taint.untaint)
app.command(rich_help_panel=HOSTS, short_help="Let no new work come to a host.")(taint.cordon)
app.command(rich_help_panel=HOSTS, epilog=drain.EXAMPLES)(drain.drain)
app.command(rich_help_panel=HOSTS, short_help="Let work come to a host again.")(taint.uncordon)

app.add_typer(
    lab_cmd.app,
    name="lab",
    rich_help_panel=LABS,
    help="Create, degrade and remove test clusters.",
)
app.command(rich_help_panel=LABS, short_help="Check whether this machine can run and move jobs.")(
    doctor_cmd.doctor
)

app.add_typer(
    cluster_cmd.config,
    name="config",
    rich_help_panel=CLUSTER,
    help="Check or print the cluster file.",
)
app.add_typer(
    cluster_cmd.keys,
    name="keys",
    rich_help_panel=CLUSTER,
    help="Make, list and revoke the keys of hosts and operators.",
)
app.add_typer(
    cluster_cmd.host,
    name="host",
    rich_help_panel=CLUSTER,
    help="Add hosts to the cluster, and remove them.",
)
app.command(
    "install-units",
    rich_help_panel=CLUSTER,
    short_help="Write systemd units for this installation.",
)(install_units.install_units)
app.command(rich_help_panel=CLUSTER, short_help="Run this host's agent.")(daemons.agent)
app.command(rich_help_panel=CLUSTER, short_help="Run the cluster's orchestrator.")(
    daemons.orchestrator
)


app.command(rich_help_panel=OTHER, short_help="Show who the cluster takes you for.")(whoami.whoami)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"liveshift {__version__}\n")
        raise typer.Exit


@app.command(rich_help_panel=OTHER)
def version() -> None:
    """Print the version."""
    _print_version(True)


@app.callback(epilog=FIRST_STEPS)
def liveshift(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
    socket: Socket = None,
    lab: Lab = None,
    connect: Connect = None,
    key: Key = None,
) -> None:
    """Move ranks of a running, unmodified PyTorch job to another host while it trains."""


def main() -> int:
    """Run the command line and return the exit code.

    Errors that end a command are printed here, and only here. If LIVESHIFT_DEBUG is set, they are
    raised instead, with their traceback; errors of usage are still printed.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # where the locale has no arrows, print question marks
            stream.reconfigure(errors="replace")
    try:
        code = help_pages.command(app, ORDER)(prog_name="liveshift", standalone_mode=False)
    except LiveshiftError as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        render.failure(error.message, error.hint)
        return error.exit_code
    except TyperException as error:
        return _wrong_usage(error)
    except typer.Abort:
        return 130
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        render.failure(
            f"internal error: {type(error).__name__}: {error}",
            f"{DEBUG_VARIABLE}=1 before the command shows where; please report it",
        )
        return 1
    return code if isinstance(code, int) else 0


def _wrong_usage(error: TyperException) -> int:
    """Print what typer found wrong, if it has a message; return the exit code.

    A command group without a verb has no message: typer has shown its help.
    """
    context = getattr(error, "ctx", None)
    if message := error.format_message():
        hint = f"`{context.command_path} --help` shows how it is used" if context else None
        render.failure(message, hint)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
