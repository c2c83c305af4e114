# SPDX-License-Identifier: Apache-2.0
"""Help pages for readers: typer's own, less what only a programmer would miss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import typer
import typer.core
import typer.main

from . import quick_start

HELP_OPTIONS = ["-h", "--help"]

Command = typer.core.TyperCommand | typer.core.TyperGroup


def command(app: typer.Typer, order: Sequence[str]) -> typer.core.TyperGroup:
    """Return the command line as typer runs it, with its verbs in this order."""
    made = typer.main.get_command(app)
    assert isinstance(made, typer.core.TyperGroup)
    made.commands = {name: made.commands[name] for name in order}
    for one in _all(made):
        one.help = _reflowed(one.help) if one.help else one.help
        _tidy(one)
    return made


def _all(group: Command) -> Iterator[Command]:
    yield group
    if isinstance(group, typer.core.TyperGroup):
        for one in group.commands.values():
            assert isinstance(one, Command)
            yield from _all(one)


def _tidy(one: Command) -> None:
    """Remove <bool> from flags and <str> from arguments, and show one name for each argument in
    the usage line."""
    context = typer.Context(one, help_option_names=HELP_OPTIONS)
    show = one.format_help

    def format_help(*args: Any) -> None:
        quick_start.load_help()
        show(*args)

    vars(one)["format_help"] = format_help
    for parameter in (*one.params, one.get_help_option(context)):
        if isinstance(parameter, quick_start.Parameter):
            quick_start.shorten(parameter)
        if isinstance(parameter, typer.core.TyperOption) and parameter.is_bool_flag:
            parameter.metavar = ""
        elif isinstance(parameter, typer.core.TyperArgument):
            name = parameter.metavar or parameter.name.upper()
            vars(parameter).update(
                display_type_rich=lambda ctx: None,
                get_usage_pieces=lambda ctx, name=name: [name],
            )


def _reflowed(text: str) -> str:
    """Join the lines of each paragraph, which the source breaks."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", paragraph) for paragraph in paragraphs)
