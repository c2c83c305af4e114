# SPDX-License-Identifier: Apache-2.0
"""Keeps the command line's start short: typer loads nothing that this program never uses.

Two thirds of the time until ``liveshift status`` printed were imports. typer 0.29 checks every
parameter with pydantic, even one that was not given. For a help page it also loads rich's markdown
and tracebacks, with pygments; these are for other markup modes, and for exceptions, which end in
cli.main here. Values that these shortcuts do not know go typer's own way.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import typer.core

Parameter = typer.core.TyperArgument | typer.core.TyperOption

UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
"""Modules that typer.rich_utils imports at its top, and the name that it takes from each."""


class Coercion:
    """Stands in for typer's coercion of one parameter. ``typers`` makes typer's own if needed."""

    def __init__(self, parameter: Parameter, typers: Callable[[], Any]) -> None:
        self._kind = kind = parameter.type_descriptor.annotation
        is_choice = isinstance(kind, type) and issubclass(kind, Enum)
        self._choices = {member.value: member for member in kind} if is_choice else {}
        self._default = parameter.default
        self._typers = typers

    def coerce(self, value: Any, param: Parameter, ctx: typer.Context) -> Any:
        """Return the value as the command takes it. Raises what typer raises for a wrong one."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if self._kind is str and isinstance(value, str):
            return value
        if self._kind == list[str] and isinstance(value, (list, tuple)):
            return list(value)
        if isinstance(value, str) and value in self._choices:
            return self._choices[value]
        if value is self._default:
            return value
        return self._typers().coerce(value, param=param, ctx=ctx)


def shorten(parameter: Parameter) -> None:
    """Take texts, choices and parameters that were not given without pydantic."""
    coercion = Coercion(parameter, parameter.get_runtime_param)
    vars(parameter)["get_runtime_param"] = lambda: coercion


def load_help() -> None:
    """Import typer's help pages without what they do not use. A second call does nothing."""
    stood_in = [name for name in UNUSED if name not in sys.modules]
    for name in stood_in:
        module = types.ModuleType(name)
        setattr(module, UNUSED[name], type(UNUSED[name], (), {}))
        sys.modules[name] = module
    try:
        import typer.rich_utils  # noqa: F401
    finally:
        for name in stood_in:
            del sys.modules[name]
