# SPDX-License-Identifier: Apache-2.0
"""``liveshift config`` and ``liveshift keys``: their place on the command line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .daemons import CONFIG, Config


class TextOrJson(StrEnum):
    """How the configuration is printed."""

    TEXT = "text"
    JSON = "json"


File = Annotated[
    Path,
    typer.Argument(metavar="[FILE]", help="The cluster file.", exists=False, dir_okay=False),
]

config = typer.Typer(no_args_is_help=True)
keys = typer.Typer(no_args_is_help=True)


@config.command()
def validate(
    file: File = CONFIG,
    output: Annotated[
        TextOrJson, typer.Option("--output", "-o", help="json is for scripts.")
    ] = TextOrJson.TEXT,
) -> None:
    """Check a cluster file, and explain its deadlines.

    Every mistake is told with its line, what was found and what was expected. Of a good file the
    deadlines are shown: where each comes from, what happens when it is over, and what it has to
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
