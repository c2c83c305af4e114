# SPDX-License-Identifier: Apache-2.0
"""Keeps a terminal from obeying what is in texts of people, hosts and journals; see texts.py."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ...texts import visible


class VisibleConsole(Console):
    """Only rich's own control codes reach the terminal, also from Live and Progress."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(visible(part.text), part.style)
