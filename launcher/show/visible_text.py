# SPDX-License-Identifier: Apache-2.0
"""Keeps a terminal from obeying what is in texts of people, hosts and journals; see texts.py."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

from ...texts import visible


class VisibleText(RenderHook):
    """Of all that a console prints, only rich's own control codes reach the terminal."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(each) for each in renderables]


class _Visible:
    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in console.render(self._shown, options):
            yield part if part.control else Segment(visible(part.text), part.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._shown)
