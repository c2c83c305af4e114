# SPDX-License-Identifier: Apache-2.0
"""Help pages for readers: typer's own, less what only a programmer would miss."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
import typer.core
import typer.main
import typer.models

from . import quick_start

HELP_OPTIONS = ["-h", "--help"]

Command = typer.core.TyperCommand | typer.core.TyperGroup


def command(app: typer.Typer, order: Sequence[str]) -> typer.core.TyperGroup:
    """Return the command line as typer runs it, with its verbs in this order.

    Each verb is made when it is asked for: typer takes as long for all of them as a command takes
    to ask the orchestrator and print the answer.
    """
    top = copy.copy(app)
    top.registered_commands, top.registered_groups = [], []
    made = typer.main.get_command(top)
    assert isinstance(made, typer.core.TyperGroup)
    vars(made)["commands"] = Verbs(app, order)
    _tidy_all(made)
    return made


class Verbs(Mapping[str, Command]):
    """An application's verbs by name, each made and tidied when it is first asked for."""

    def __init__(self, app: typer.Typer, order: Sequence[str]) -> None:
        self._infos = {_name(info): info for info in app.registered_commands}
        self._groups = {str(info.name): info for info in app.registered_groups}
        assert set(order) == self._infos.keys() | self._groups.keys()
        self._order = list(order)
        self._made: dict[str, Command] = {}
        self._how: dict[str, Any] = {
            "pretty_exceptions_short": app.pretty_exceptions_short,
            "rich_markup_mode": app.rich_markup_mode,
        }
        self._suggests = app.suggest_commands

    def __getitem__(self, name: str) -> Command:
        if name not in self._order:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Command:
        made: Any
        if name in self._groups:
            made = typer.main.get_group_from_info(
                self._groups[name], suggest_commands=self._suggests, **self._how
            )
        else:
            made = typer.main.get_command_from_info(self._infos[name], **self._how)
        assert isinstance(made, Command)
        _tidy_all(made)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


def _name(info: typer.models.CommandInfo) -> str:
    assert info.callback is not None
    return info.name or typer.main.get_command_name(info.callback.__name__)


def _tidy_all(one: Command) -> None:
    one.help = _reflowed(one.help) if one.help else one.help
    _tidy(one)
    if isinstance(one, typer.core.TyperGroup) and not isinstance(one.commands, Verbs):
        for below in one.commands.values():
            assert isinstance(below, Command)
            _tidy_all(below)


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
