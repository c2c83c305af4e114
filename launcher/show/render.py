# SPDX-License-Identifier: Apache-2.0
"""Consoles, errors and JSON: how anything of this program reaches a person or a script.

Data goes to stdout, everything else to stderr. Names and messages come from elsewhere, so text is
not read as rich's markup unless a caller asks for it, and no terminal obeys what is in it. A pipe
gets lines as long as they need to be.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from ...texts import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

PIPE_WIDTH = 1000  # columns; a table takes only those that it needs


def console(stream: TextIO, *, markup: bool = False, width: int | None = None) -> Console:
    """Return a console on a stream. rich itself honours NO_COLOR and distinguishes a terminal from
    a pipe."""
    from .visible_text import VisibleConsole

    return VisibleConsole(
        file=stream,
        markup=markup,
        highlight=False,
        emoji=False,
        soft_wrap=False,
        width=width if stream.isatty() else PIPE_WIDTH,
    )


def out(*, markup: bool = False) -> Console:
    """Return the console for data: stdout."""
    return console(sys.stdout, markup=markup)


def err() -> Console:
    """Return the console for everything else: stderr."""
    return console(sys.stderr)


def note(text: str, style: str = "") -> None:
    """Print a line for the person, on stderr."""
    if sys.stderr.isatty():
        err().print(text, style=style, soft_wrap=True)
    else:  # rich is not needed
        sys.stderr.write(visible(text) + "\n")
        sys.stderr.flush()


def failure(message: str, hint: str | None = None) -> None:
    """Print ``error: …`` and ``hint: …`` on stderr. Further lines of a message stay as they are."""
    if not sys.stderr.isatty():
        sys.stderr.write(visible(f"error: {message}\n" + (f"hint: {hint}\n" if hint else "")))
        sys.stderr.flush()
        return
    from rich.text import Text

    to = err()
    to.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    if hint:
        to.print(Text.assemble(("hint: ", "bold cyan"), hint), soft_wrap=True)


def plain(value: Any) -> Any:
    """Return a message as a script wants it: plain names, without the wire's tag."""
    import msgspec

    made = msgspec.to_builtins(value)
    if isinstance(made, dict):
        made.pop("t", None)
    return made


def print_json(value: Any) -> None:
    """Print :func:`plain` of a message as indented JSON."""
    sys.stdout.write(json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def show(*parts: RenderableType) -> None:
    """Print data to stdout, one part below the other. A table that is too wide for a terminal is
    not cut: the terminal breaks its lines."""
    from rich.table import Table

    to = out()
    if not to.is_terminal:
        with to.capture() as captured:
            to.print(*parts, sep="\n")
        lines = (line.rstrip() for line in captured.get().splitlines())
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        return
    for part in parts:
        if isinstance(part, Table) and _needed(part, to) > to.width:
            console(sys.stdout, width=PIPE_WIDTH).print(part)
        else:
            to.print(part)


def _needed(table: Table, to: Console) -> int:
    """Return the columns of the terminal that a table takes with its wrapping columns at their
    narrowest."""
    from rich.measure import Measurement

    endless = to.options.update(max_width=PIPE_WIDTH)
    needed = 0
    for column in table.columns:
        cells = [Measurement.get(to, endless, cell) for cell in (column.header, *column.cells)]
        widest = max((cell.maximum if column.no_wrap else cell.minimum) for cell in cells)
        needed += widest + 2
    return needed


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return a table without lines, like kubectl's. The columns in ``right`` hold numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in ("taint", "what", "command", "reason", "found", "protected"),
            overflow="fold",
        )
    return made


def count(number: int, one: str, many: str | None = None) -> str:
    """Return ``1 capsule``, ``2 capsules``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def clock(seconds: float) -> str:
    """Write a span for a person who waits: ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
