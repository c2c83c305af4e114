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
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from .. import __version__
from ..errors import LiveshiftError
from .commands.options import Connect, Key, Lab, Socket
from .show import help_pages, render, stdout

DEBUG_VARIABLE = "LIVESHIFT_DEBUG"

JOBS, HOSTS, LABS, CLUSTER, OTHER = "Jobs", "Hosts", "This machine", "A real cluster", "Other"
FIRST_STEPS = """\
[bold]First steps[/]

sudo liveshift lab up --hosts 3   [dim]# three virtual hosts on this machine[/]

liveshift run --nnodes 2 --name gpt -- torchrun --nproc-per-node 1 train.py

liveshift drain h1   [dim]# meanwhile: gpt/1 moves to the spare, and trains on[/]
"""


@dataclass(frozen=True)
class Verb:
    """Where a verb is defined, and how the list of all verbs shows it.

    ``module`` lies in launcher/commands/; ``attribute`` is the function or the group there, and
    ``examples`` the constant with the end of its help. Without ``short_help`` the list shows the
    first sentence of its help. ``interspersed``: options may follow its arguments.
    """

    panel: str
    module: str
    attribute: str
    short_help: str | None = None
    examples: str = ""
    interspersed: bool = True


_VERBS = {
    "run": Verb(JOBS, "run", "run", examples="EXAMPLES", interspersed=False),
    "status": Verb(JOBS, "status", "status", examples="EXAMPLES"),
    "logs": Verb(JOBS, "logs", "logs", examples="EXAMPLES"),
    "inspect": Verb(
        *(JOBS, "inspect_cmd", "inspect"),
        "Show device memory, streams and communicators of a job.",
        "EXAMPLES",
    ),
    "migrate": Verb(
        *(JOBS, "migrate", "migrate"),
        "Move one capsule to another host or GPU while it runs.",
        "EXAMPLES",
    ),
    "cancel": Verb(
        *(JOBS, "cancel", "cancel"), "Cancel a move: the capsule stays where it is.", "EXAMPLES"
    ),
    "events": Verb(
        *(JOBS, "events", "events"),
        "Show the history: who asked for what, how it ended.",
        "EXAMPLES",
    ),
    "snapshot": Verb(
        *(JOBS, "snapshot", "snapshot"),
        "Save a snapshot of a whole job; it trains on.",
        "EXAMPLES",
    ),
    "suspend": Verb(
        *(JOBS, "suspend", "suspend"),
        "Let a whole job leave its hosts; nothing is lost.",
        "SUSPEND_EXAMPLES",
    ),
    "resume": Verb(
        *(JOBS, "suspend", "resume"),
        "Let a suspended or saved job go on.",
        "RESUME_EXAMPLES",
    ),
    "rewind": Verb(
        *(JOBS, "rewind", "rewind"), "Take a job back to its newest snapshot.", "EXAMPLES"
    ),
    "stop": Verb(JOBS, "stop", "stop", "End a job."),
    "cordon": Verb(HOSTS, "taint", "cordon", "Let no new work come to a host."),
    "drain": Verb(HOSTS, "drain", "drain", examples="EXAMPLES"),
    "taint": Verb(
        *(HOSTS, "taint", "taint"), "Move everything off a host; do not wait.", "EXAMPLES"
    ),
    "uncordon": Verb(HOSTS, "taint", "uncordon", "Let work come to a host again."),
    "untaint": Verb(HOSTS, "taint", "untaint", "Take a host's taint back."),
    "lab": Verb(LABS, "lab_cmd", "app", "Create, degrade and remove test clusters."),
    "doctor": Verb(
        LABS, "doctor_cmd", "doctor", "Check whether this machine can run and move jobs."
    ),
    "host": Verb(CLUSTER, "cluster_cmd", "host", "Add hosts to the cluster, and remove them."),
    "config": Verb(CLUSTER, "cluster_cmd", "config", "Check or print the cluster file."),
    "keys": Verb(
        CLUSTER, "cluster_cmd", "keys", "Make, list and revoke the keys of hosts and operators."
    ),
    "install-units": Verb(
        *(CLUSTER, "install_units", "install_units"),
        "Write systemd units for this installation.",
    ),
    "agent": Verb(CLUSTER, "daemons", "agent", "Run this host's agent."),
    "orchestrator": Verb(CLUSTER, "daemons", "orchestrator", "Run the cluster's orchestrator."),
    "whoami": Verb(OTHER, "whoami", "whoami", "Show who the cluster takes you for."),
}
ORDER = (*_VERBS, "version")


def app(verbs: Iterable[str] = ORDER) -> typer.Typer:
    """Return the command line with these verbs. Only their modules are imported."""
    made = typer.Typer(
        name="liveshift",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": help_pages.HELP_OPTIONS},
    )
    made.callback(epilog=FIRST_STEPS)(liveshift)
    for name in verbs:
        if name == "version":
            made.command(rich_help_panel=OTHER)(version)
            continue
        verb = _VERBS[name]
        module = import_module(f".commands.{verb.module}", __package__)
        found: Any = getattr(module, verb.attribute)
        if isinstance(found, typer.Typer):
            made.add_typer(found, name=name, rich_help_panel=verb.panel, help=verb.short_help)
            continue
        made.command(
            name,
            rich_help_panel=verb.panel,
            short_help=verb.short_help,
            epilog=getattr(module, verb.examples) if verb.examples else None,
            context_settings=None if verb.interspersed else {"allow_interspersed_args": False},
        )(found)
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"liveshift {__version__}\n")
        raise typer.Exit


def version() -> None:
    """Print the version."""
    _print_version(True)


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
    """Run the command line and return the exit code, once all that it prints is written."""
    stdout.open_closed()
    stdout.watch()
    try:
        code = _main()
        sys.stdout.flush()
    except stdout.OutputError as error:
        stdout.drop()
        render.failure(
            f"stdout cannot be written: {error.strerror}",
            "redirect it elsewhere; what the command has changed is changed all the same",
        )
        return 1
    except BrokenPipeError:  # its reader has what it wanted
        stdout.drop()
        return 1
    return code


def _main() -> int:
    """Run the command line and return the exit code.

    Errors that end a command are printed here, and only here. If LIVESHIFT_DEBUG is set, they are
    raised instead, with their traceback; errors of usage are still printed.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # where the locale has no arrows, print question marks
            stream.reconfigure(errors="replace")
    # All verbs take several times as long to import as the one that is wanted.
    verbs = sys.argv[1:2] if sys.argv[1:2] and sys.argv[1] in ORDER else ORDER
    try:
        made = help_pages.command(app(verbs), verbs)
        code = made(prog_name="liveshift", standalone_mode=False)
    except LiveshiftError as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        render.failure(error.message, error.hint)
        return error.exit_code
    except TyperException as error:
        return _wrong_usage(error)
    except typer.Abort:
        return 130
    except stdout.OutputError:
        raise
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
