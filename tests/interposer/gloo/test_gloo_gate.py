# SPDX-License-Identifier: Apache-2.0
"""Jobs on real torch and gloo that are brought to boundaries at random moments.

The agents' and the orchestrator's parts are the product's own (host_gate.py, collective_clock.py),
without what lies between them: one gate for each rank, as if each had a host of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checkout import SUPPORT
from gloo_boundaries import PATIENCE_S, assert_boundary, close_at_boundary
from waits import until

from liveshift.interposer import library, page_directory
from liveshift.interposer.layout import CommunicatorState
from liveshift.interposer.orders import OrderedPage, open_ordered

PROGRAMS = SUPPORT / "interposer" / "gloo_programs.py"


@dataclass
class Ranks:
    """The processes of one program: a parent, which has imported torch for them, and the ranks."""

    folder: Path
    size: int
    parent: subprocess.Popen[str]
    pages: list[OrderedPage] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """None has ended."""
        ranks = [f"/proc/{each.page().pid}" for each in self.pages]
        return self.parent.poll() is None and all(map(os.path.exists, ranks))

    def finished(self) -> int:
        """Operations that have come back, over all ranks."""
        return sum(p.page().finished for p in self.pages)

    def results(self) -> list[str]:
        """What each rank has computed, once all have ended well."""
        said = self.parent.communicate(timeout=PATIENCE_S)[1]
        assert self.parent.returncode == 0, said
        return self.left_in(self.folder)

    def left_in(self, folder: Path) -> list[str]:
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(self.size)]


@contextmanager
def ranks(
    folder: Path, program: str, size: int, steps: int, alone: Path | None = None
) -> Iterator[Ranks]:
    """Begun, and each with a page; ``alone`` is where they have run before, undisturbed."""
    folders = [alone, folder] if alone else [folder]
    for each in folders:
        (each / "pages").mkdir(parents=True)
    pages = folder / "pages"
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted} | {
        "LD_PRELOAD": str(library.library_path()),
        "LIVESHIFT_PAGES": str(pages),
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(PROGRAMS), program, str(steps), *map(str, folders)]
    with ExitStack() as cleanup:
        parent = cleanup.enter_context(
            subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, text=True, process_group=0
            )
        )
        cleanup.callback(end, parent.pid)
        begun = Ranks(folder, size, parent)
        until(
            lambda: len(page_directory.paths(pages)) == size or not begun.running,
            PATIENCE_S,
            "every rank has a page",
        )
        directory = os.open(pages, os.O_RDONLY | os.O_DIRECTORY)
        cleanup.callback(os.close, directory)
        for path in page_directory.paths(pages):
            begun.pages.append(open_ordered(path, directory))
            cleanup.callback(begun.pages[-1].close)
        yield begun


def end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


CASES = [
    ("several", 2, 80),
    ("pairs", 3, 120),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (("ddp", 2, 80), ("groups", 4, 60), ("fresh", 3, 16))
    ),
]


@pytest.mark.parametrize(("program", "size", "steps"), CASES)
def test_a_job_armed_at_random_moments_computes_the_same(
    tmp_path: Path, program: str, size: int, steps: int
) -> None:
    source = random.Random(f"{program} {os.environ.get('LIVESHIFT_SEED', '1')}")
    boundaries = 0
    alone = tmp_path / "alone"
    with ranks(tmp_path / "armed", program, size, steps, alone) as disturbed:
        expected = disturbed.left_in(alone)
        attempt = 0
        while disturbed.running:
            begin = disturbed.finished() + source.randrange(8 * size)
            while disturbed.running and disturbed.finished() < begin:
                pass
            attempt += 1
            if close_at_boundary(disturbed.pages, attempt, lambda: disturbed.running):
                assert_boundary(disturbed.pages)
                boundaries += 1
            for p in disturbed.pages:
                p.open()
        assert disturbed.results() == expected
        for p in disturbed.pages:
            assert p.answer()["unidentified"] == p.answer()["untracked"] == 0
            assert p.page().started == p.page().finished
            assert {c.state for c in p.communicators()} <= {
                CommunicatorState.ENDED,
                CommunicatorState.LIVE,
            }
    assert boundaries >= 2


def test_a_job_whose_agents_fall_silent_goes_on_after_the_lease(tmp_path: Path) -> None:
    with ranks(tmp_path, "several", 2, 40) as job:
        for p in job.pages:
            p.arm(1, 300, 1000)
        assert len(set(job.results())) == 2
        reopened = [p.answer()["reopened"] for p in job.pages]
        assert 1 in reopened  # the other may have had nothing left to do
        assert all(p.page().started == p.page().finished for p in job.pages)


@pytest.mark.parametrize(
    "variable", ["TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"]
)
def test_what_has_no_identity_works_as_ever_and_is_said_to_have_none(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with ranks(tmp_path, "groups", 3, 10) as job:
        assert len(set(job.results())) >= 1
        for p in job.pages:
            assert {made.id for made in p.communicators()} == {0}
            assert p.clocks() == []
            assert p.answer()["unidentified"] == p.page().started > 0
