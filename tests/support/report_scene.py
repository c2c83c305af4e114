# SPDX-License-Identifier: Apache-2.0
"""A report of made-up runs for the tests of reports: the second rank moves after step 10."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from liveshift.launcher.report.record import (
    DowntimeReport,
    RankRun,
    ReportedMigration,
    ReportedStep,
)
from liveshift.runtime.messages import Phase

BEGIN = 1_700_000_000.0
STILL = 1.2  # seconds that the moved run is frozen after step 10
LOSSES = [4.5 - 0.1 * n + 0.001 * (n % 3) for n in range(20)]
PACED = "paused after collective 284 of gloo default_pg"
HOSTILE = '<script>alert("x")</script>&\'"><img src=http://evil.example/x onerror=alert(1)>'


def run(rank: int, still: float = 0.0, moves_to: str = "") -> RankRun:
    """Twenty steps of 0.1 s, the eleventh delayed by ``still``."""
    steps = []
    for n, loss in enumerate(LOSSES):
        later = n >= 10
        host = moves_to if later and moves_to else f"h{rank}"
        steps.append(
            ReportedStep(n + 1, loss + rank, BEGIN + 0.1 * n + (still if later else 0.0), host)
        )
    return RankRun(rank, tuple(steps), f"{rank}f" * 32)


@pytest.fixture
def migration() -> ReportedMigration:
    phases = (
        Phase("prepare", 0.0, 0.3, detail="preflight on h2"),
        Phase("dump", 0.32, 0.4, 246_000_000, frozen=True),
        Phase("restore", 0.70, 0.5, frozen=True),  # overlaps the dump by 0.02 s
        Phase("finish", 1.25, 0.1),
    )
    return ReportedMigration(
        capsule="gpt/1",
        source="h1",
        destination="h2",
        reason="ECC errors rising",
        epoch=2,
        requested_at=BEGIN + 0.55,
        started_at=BEGIN + 0.6,
        phases=phases,
        unaccounted_s=0.07,
        image_bytes=93_000_000,
        ahead_bytes=782_000_000,
        link_rate=812e6,
        ranks=(1,),
    )


@pytest.fixture
def report(migration: ReportedMigration) -> DowntimeReport:
    return DowntimeReport(
        title="demo",
        command="liveshift run --nnodes 2 --name gpt -- torchrun train_gpt.py",
        reference=(run(0), run(1)),
        moved=(run(0, STILL), run(1, STILL, "h2")),
        move=migration,
        environment={"kernel": "6.1.0", "liveshift": "0.1.0"},
        outcome="h1 was emptied.",
    )


class Page(HTMLParser):
    """Collects the tags, what they refer to, and the words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "path", "rect", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data


def with_loss(one: RankRun, step: int, loss: float) -> RankRun:
    steps = tuple(replace(s, loss=loss) if s.step == step else s for s in one.steps)
    return replace(one, steps=steps)
