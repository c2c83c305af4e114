# SPDX-License-Identifier: Apache-2.0
"""Contexts and their clocks, on a C double of gloo: tests/doubles/gloo."""

from __future__ import annotations

import os
import random
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import sanitizers
from checkout import INTERPOSER, ROOT
from doubles.gpu.build import kept
from gloo_boundaries import PATIENCE_S, assert_boundary, close_at_boundary
from sanitizers import BUILT, compile_c
from waits import until

from liveshift.interposer import library, page, page_directory
from liveshift.interposer.layout import CommunicatorState
from liveshift.interposer.orders import open_ordered

DOUBLE = ROOT / "tests" / "doubles" / "gloo"


class Built:
    """The double of gloo and its programs; sanitized, the interposer is linked with them."""

    def __init__(self, build: str) -> None:
        flags = sanitizers.flags(build)
        self.linked = sanitizers.interposer(flags) if flags else None
        sources = [*DOUBLE.glob("*.[ch]"), INTERPOSER / "hooks/entry_points.h"]
        own = [*flags, *(sanitizers.first(self.linked) if self.linked else [])]

        def make(part: Path) -> None:
            torch, include = part / "libtorch_cpu.so", [f"-I{DOUBLE}", *flags]
            soname = "-Wl,-soname,libtorch_cpu.so"
            compile_c(torch, *include, "-shared", "-fPIC", soname, DOUBLE / "torch.c")
            for name in ("program", "busy"):
                source = DOUBLE / f"{name}.c"
                compile_c(part / name, *include, source, *own, torch, "-Wl,-rpath,$ORIGIN")

        self.folder = kept(BUILT, f"gloo-{build}", sources, own, make)

    def environment(self, pages: Path) -> dict[str, str]:
        preload = {} if self.linked else {"LD_PRELOAD": str(library.library_path())}
        return os.environ | sanitizers.OPTIONS | preload | {"LIVESHIFT_PAGES": str(pages)}


@pytest.fixture(scope="module", params=sanitizers.SANITIZERS)
def built(request: pytest.FixtureRequest) -> Built:
    return Built(request.param)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    folder.mkdir()
    return folder


class Seen:
    """A page after its process has ended."""

    def __init__(self, pages: Path, pid: int) -> None:
        with page.opened(pages / str(pid)) as file:
            self.communicators = file.communicators()
            self.clocks = file.clocks()
            self.answer = file.answer()
            self.page = file.page()
        self.begun = {kind: n for kind, n in self.page.begun.items() if n}
        self.pairs = {
            (c.sender, c.receiver): (c.announced, c.returned) for c in self.clocks if c.sender >= 0
        }


def run(built: Built, pages: Path, steps: str) -> tuple[Seen, str]:
    with subprocess.Popen(
        [built.folder / "program", *steps.split()],
        env=built.environment(pages),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    seen = Seen(pages, process.pid)
    assert seen.page.started == seen.page.finished or "send" in steps or "recv" in steps
    return seen, said


def test_all_members_give_a_context_the_same_id_and_each_its_rank(
    built: Built, pages: Path
) -> None:
    made = [run(built, pages, f"connect {rank} 7 call 2")[0] for rank in range(3)]
    assert len({seen.communicators[0].id for seen in made}) == 1
    assert [(c.size, c.rank, c.made_by) for s in made for c in s.communicators] == [
        (3, 0, "G"),
        (3, 1, "G"),
        (3, 2, "G"),
    ]
    for seen in made:
        (clock,) = seen.clocks
        assert clock.id == seen.communicators[0].id != 0
        assert (clock.announced, clock.returned, clock.blocking) == (2, 2, 1)
        assert seen.communicators[0].operations == 2
        assert seen.answer["unidentified"] == seen.answer["untracked"] == 0


def test_other_contexts_have_other_ids(built: Built, pages: Path) -> None:
    seen, _ = run(built, pages, "connect 0 7 connect 0 8 connect 0 9 call 1")
    assert len({made.id for made in seen.communicators}) == 3
    assert [made.ordinal for made in seen.communicators] == [1, 2, 3]
    assert [clock.announced for clock in seen.clocks] == [0, 0, 1]


def test_what_members_write_without_numbers_is_no_identity(built: Built, pages: Path) -> None:
    """Two contexts of the same listeners would have the same: it passes, and is said to be so."""
    seen, _ = run(built, pages, "odd connect 0 7 call 3")
    (made,) = seen.communicators
    assert (made.id, made.state, made.size) == (0, CommunicatorState.LIVE, 3)
    assert seen.clocks == []
    assert seen.answer["unidentified"] == 3
    assert seen.begun == {"gloo.allreduce": 3}


def test_an_ended_context_gives_its_rows_back_and_its_address_can_be_used_again(
    built: Built, pages: Path
) -> None:
    seen, _ = run(built, pages, "connect 0 7 call 3 end connect 0 8 call 2")
    assert [made.state.name for made in seen.communicators] == ["ENDED", "LIVE"]
    (clock,) = seen.clocks
    assert (clock.row, clock.communicator, clock.returned) == (0, 1, 2)
    assert seen.page.finished == 5


def test_an_address_used_again_without_an_end_is_another_context(built: Built, pages: Path) -> None:
    """Every context of the program that ends is at the place of the next one."""
    steps = " ".join(f"connect 0 {seed} call 1 end" for seed in range(700))
    seen, _ = run(built, pages, steps + " connect 0 700 call 1")
    assert len(seen.communicators) == 512  # rows of ended ones were used again
    assert [clock.returned for clock in seen.clocks] == [1]
    assert seen.begun == {"gloo.allreduce": 701}
    assert seen.answer["unidentified"] == 0


def test_more_contexts_than_the_page_has_rows_pass_unidentified(built: Built, pages: Path) -> None:
    steps = " ".join(f"connect 0 {seed} call 1" for seed in range(514))
    seen, _ = run(built, pages, steps)
    assert len(seen.clocks) == 512
    assert seen.answer["unidentified"] == 2


def test_threads_share_a_clock_and_lose_no_count(built: Built, pages: Path) -> None:
    seen, _ = run(built, pages, "connect 0 7 many")
    assert [clock.returned for clock in seen.clocks] == [4000]


def test_what_a_collective_calls_from_within_is_part_of_it(built: Built, pages: Path) -> None:
    seen, _ = run(built, pages, "connect 0 7 nested call 1")
    assert seen.begun == {"gloo.allreduce": 2}
    assert [clock.returned for clock in seen.clocks] == [2]


def test_a_forked_child_knows_nothing_of_its_parents_contexts(built: Built, pages: Path) -> None:
    seen, said = run(built, pages, "connect 0 7 call 1 fork call 2 connect 1 9 call 1")
    assert [clock.returned for clock in seen.clocks] == [1]
    child = Seen(pages, int(said))
    assert child.answer["unidentified"] == 2
    assert [(made.rank, made.ordinal) for made in child.communicators] == [(1, 1)]
    assert [clock.returned for clock in child.clocks] == [1]


def test_a_send_and_its_receive_have_one_clock(built: Built, pages: Path) -> None:
    seen, _ = run(built, pages, "connect 0 7 send 1 sent 1 send 1 recv 2")
    assert seen.pairs == {(0, 1): (2, 1), (2, 0): (1, 0)}
    assert seen.begun == {"gloo.send": 2, "gloo.recv": 1}
    other, _ = run(built, pages, "connect 1 7 recv 0 received 0")
    assert other.pairs == {(0, 1): (1, 1)}
    assert {c.id for c in other.clocks} <= {c.id for c in seen.clocks}


def test_what_completes_is_of_its_peer_and_direction(built: Built, pages: Path) -> None:
    seen, _ = run(built, pages, "connect 0 7 send 1 send 2 recv 1 sent 2 received 2 sent 2")
    assert seen.pairs == {(0, 1): (1, 0), (0, 2): (1, 1), (1, 0): (1, 0)}


def test_a_receive_from_any_counts_when_it_is_known_from_whom(built: Built, pages: Path) -> None:
    seen, _ = run(built, pages, "connect 0 7 any any received 2")
    assert seen.pairs == {(1, 0): (0, 0), (2, 0): (1, 1)}
    assert seen.begun == {"gloo.recv": 1}


@pytest.mark.parametrize("how", ["drop", "end"])
def test_what_is_in_flight_ends_with_its_buffer_or_context(
    built: Built, pages: Path, how: str
) -> None:
    seen, _ = run(built, pages, f"connect 0 7 send 1 recv 1 any {how}")
    assert seen.page.started == seen.page.finished == 2
    assert seen.pairs == ({(0, 1): (1, 1), (1, 0): (1, 1), (2, 0): (0, 0)} if how == "drop" else {})


@pytest.mark.needs("valgrind")
def test_the_open_gate_costs_few_instructions(pages: Path) -> None:
    built = Built("plain")
    program = built.folder / "program"

    def counted(calls: int, env: dict[str, str]) -> int:
        callgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        said = subprocess.run(
            [*callgrind, program, "connect", "0", "7", "call", str(calls)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stderr
        found = re.search(r"Collected : (\d+)", said)
        assert found is not None, said
        return int(found[1])

    hooked, bare = built.environment(pages), dict(os.environ)
    per_call = [(counted(11_000, env) - counted(1_000, env)) / 10_000 for env in (hooked, bare)]
    print(f"{per_call[0] - per_call[1]:.1f} instructions in hook and gate")
    assert per_call[1] < 20
    assert 0 < per_call[0] - per_call[1] <= 60


def test_busy_threads_are_stopped_at_random_moments(built: Built, pages: Path) -> None:
    """Contexts come, are used and go, children are forked; a thread of gloo's completes."""
    chance = random.Random(3)
    with (
        subprocess.Popen(
            [built.folder / "busy"],
            env=built.environment(pages),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
        ExitStack() as cleanup,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        cleanup.callback(process.kill)
        assert process.stdout.readline() == b"begun\n"
        directory = os.open(pages, os.O_RDONLY | os.O_DIRECTORY)
        cleanup.callback(os.close, directory)
        opened = open_ordered(pages / str(process.pid), directory)
        cleanup.callback(opened.close)
        for attempt in range(1, 61):
            if attempt % 12 == 0:
                process.stdin.write(b"\n")
            assert close_at_boundary([opened], attempt, lambda: process.poll() is None)
            assert_boundary([opened])
            opened.open()
            wanted = opened.page().finished + chance.randrange(200)
            until(lambda: opened.page().finished >= wanted, PATIENCE_S, "it goes on")  # noqa: B023 - called in this turn only
        process.stdin.close()
        assert process.wait(60) == 0
    seen = Seen(pages, process.pid)
    assert seen.page.started == seen.page.finished > 0
    assert seen.answer["untracked"] == 0
    assert seen.clocks == []
    forked = [path for path in page_directory.paths(pages) if path.name != str(process.pid)]
    assert len(forked) == 5
    for path in forked:
        assert Seen(pages, int(path.name)).answer["unidentified"] == 3
