# SPDX-License-Identifier: Apache-2.0
"""``liveshift config``, ``keys`` and ``host``: their place on the command line (config_cmd.py,
keys_cmd.py and host_cmd.py do the work)."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ...runtime.config.choices import Spare
from .daemons import CONFIG, Config
from .options import AsTableOrJson, TableOrJson, TextOrJson


class KeyRole(StrEnum):
    """What an operator's key allows (runtime/config/access.py)."""

    VIEW = "view"
    OPERATE = "operate"
    ADMIN = "admin"


AsTextOrJson = Annotated[TextOrJson, typer.Option("--output", "-o", help="json is for scripts.")]
File = Annotated[Path, typer.Argument(metavar="[FILE]", help="The cluster file.", dir_okay=False)]

config = typer.Typer(no_args_is_help=True)
keys = typer.Typer(no_args_is_help=True)
host = typer.Typer(no_args_is_help=True)


@config.command()
def validate(file: File = CONFIG, output: AsTextOrJson = TextOrJson.TEXT) -> None:
    """Check a cluster file, and explain its deadlines.

    For every mistake it prints the line, what was found and what was expected. For a good file it
    prints the deadlines: where each comes from, what happens when it is over, and what it has to
    fit into. All of them follow from timeouts.collective unless they are given.
    """
    from . import config_cmd

    config_cmd.validate(file, output.value)


@config.command()
def show(
    file: File = CONFIG,
    output: Annotated[
        TextOrJson, typer.Option("--output", "-o", help="text is TOML again; json is for scripts.")
    ] = TextOrJson.TEXT,
) -> None:
    """Print every setting in effect and the line it comes from.

    What is derived from another setting is printed as a comment.
    """
    from . import config_cmd

    config_cmd.show(file, output.value)


@keys.command()
def init(config: Config = CONFIG) -> None:
    """Make the key pairs of the orchestrator and of every host in the cluster file."""
    from . import keys_cmd

    keys_cmd.init(config)


@keys.command("add-host")
def add_host(
    name: Annotated[str, typer.Argument(metavar="HOST", help="A host of the cluster file.")],
    config: Config = CONFIG,
) -> None:
    """Make the key pair of one more host, which the cluster file must have already."""
    from . import keys_cmd

    keys_cmd.add_host(config, name)


@keys.command("add-operator")
def add_operator(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 63 of a-z, 0-9 and -.")],
    role: Annotated[
        KeyRole,
        typer.Option(
            "--role",
            help="view: see everybody's jobs. operate: also taint hosts, move and end jobs. admin:"
            " also read their output.",
            show_default=False,
        ),
    ],
    config: Config = CONFIG,
) -> None:
    """Make the key pair of an operator, who asks from any machine with --connect and --key.

    A job cannot be run with it: a job runs as a user, and a key is none.
    """
    from . import keys_cmd

    keys_cmd.add_operator(config, name, role.value)


@keys.command()
def revoke(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The host or operator whose key to revoke.")
    ],
    config: Config = CONFIG,
) -> None:
    """Take a host's or an operator's key out of use.

    The orchestrator hangs up on it within a second; a copy of the key put back does not count.
    Capsules on a revoked host run on, out of reach: drain it first.
    """
    from . import keys_cmd

    keys_cmd.revoke(config, name)


@keys.command()
def trust(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the other cluster.")],
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Its key, as `liveshift keys signer` prints it.")
    ],
    config: Config = CONFIG,
) -> None:
    """Let jobs that another cluster has saved in a directory be resumed here.

    A person who has that cluster's orchestrator key can then run any code here, as any user. Run
    this on the orchestrator's machine. To end the trust, remove the file that it prints.
    """
    from . import keys_cmd

    keys_cmd.trust(config, name, key)


@keys.command()
def signer(config: Config = CONFIG) -> None:
    """Print the key by which other clusters know what this one has saved.

    Run it on the orchestrator's machine, and give the key to `liveshift keys trust` elsewhere.
    """
    from . import keys_cmd

    keys_cmd.signer(config)


@keys.command("list")
def list_(config: Config = CONFIG, output: AsTableOrJson = TableOrJson.TABLE) -> None:
    """List who has or had a key: machines, operators with their roles, and what was revoked."""
    from . import keys_cmd

    keys_cmd.show(config, output.value)


@host.command("add")
def host_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new host's name.")],
    address: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", help="Its IPv4 address, reachable by all other hosts."),
    ],
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots", metavar="N", help="How many capsules may run there at once.", min=1, max=64
        ),
    ] = None,
    spare: Annotated[
        Spare | None,
        typer.Option("--spare", help="Whether moves may go there: floating is the default."),
    ] = None,
    config: Config = CONFIG,
    output: AsTextOrJson = TextOrJson.TEXT,
) -> None:
    """Enter a host into the cluster file and make its keys.

    Run it on the orchestrator's machine. It prints the commands that bring the file and the keys to
    the new host and to the others. Daemons take a changed file up by themselves, as soon as no move
    is under way.
    """
    from . import host_cmd

    settings = {"slots": slots, "spare": spare.value if spare else None}
    given = {key: value for key, value in settings.items() if value is not None}
    host_cmd.add(config, name, address, given, output.value)


@host.command("remove")
def host_remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A host of the cluster file.")],
    config: Config = CONFIG,
    output: AsTextOrJson = TextOrJson.TEXT,
) -> None:
    """Take a host out of the cluster file and revoke its key.

    Refused while capsules run there: drain it first. It prints the commands that end its agent and
    bring the file to the other hosts.
    """
    from . import host_cmd

    host_cmd.remove(config, name, output.value)
