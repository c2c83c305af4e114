# SPDX-License-Identifier: Apache-2.0
"""Teardown and rebuild beneath programs on the simulated NCCL: what is refused, and in which words;
deadlines; members that are missing; an agent that falls silent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nccl_coordinator import Abandoned, Ranks, Refused, World, await_true, nccl

from liveshift.interposer.layout import CommunicatorState, WantedState
from liveshift.interposer.orders import OrderedPage


@contextmanager
def commanded(world: World, folder: Path, count: int = 2, **extra: Any) -> Iterator[Ranks]:
    """Ranks that wait for commands, with one communicator."""
    with world.ranks("commanded", count, folder / "run", **extra) as ranks:
        ranks.await_line("begun")
        assert ranks.ask("init world") == ["0"] * count
        assert set(ranks.ask("sum")) == {str(count * (count + 1) // 2)}
        yield ranks


def announced(page: OrderedPage) -> bool:
    """Whether a collective has been called after the first."""
    return max(clock.announced for clock in page.clocks()) > 2


def threads(pid: int) -> list[str]:
    return sorted(
        (path / "comm").read_text().strip() for path in Path(f"/proc/{pid}/task").iterdir()
    )


def test_an_idle_application_is_moved_without_it(world: World, tmp_path: Path) -> None:
    """No thread of it comes to the gate: ours does the work."""
    with commanded(world, tmp_path) as ranks:
        for _ in range(2):
            ranks.move()
            assert ranks.ask("sum") == ["3", "3"]
        with ranks.pages() as pages:
            for page in pages:
                (row,) = nccl(page)
                assert (row.generation, row.state) == (2, CommunicatorState.LIVE)
                assert page.answer()["rebuilt_ns"] > 200e6  # grace for an application's thread


def test_while_down_nothing_of_nccl_is_left_and_questions_are_answered(
    world: World, tmp_path: Path
) -> None:
    with commanded(world, tmp_path) as ranks, ranks.attempts() as attempt:
        attempt.reach()
        attempt.close()
        attempt.order(WantedState.TEARDOWN)
        for process, page in zip(ranks.processes, attempt.pages, strict=True):
            assert not [name for name in threads(process.pid) if name.startswith("NCCL")]
            assert [row.state for row in nccl(page)] == [CommunicatorState.DOWN]
            assert page.answer()["down"] == 1
        assert ranks.ask("error") == ["0", "0"]
        ranks.tell("sum")  # waits at the gate, and rebuilds there
        attempt.rebuild()
        assert ranks.answers() == ["3", "3"]
        assert all(page.answer()["rebuilt_ns"] < 1e9 for page in attempt.pages)


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        ("ring", ["2", "1"]),  # a group: collected, and made when its numbers are taken
        ("scaled", ["6", "6"]),  # an operator: its communicator is waited for
        ("init other", ["0", "0"]),
        ("split other", ["0", "0"]),
        ("finalize", ["0", "0"]),
        ("destroy", ["0", "0"]),
    ],
)
def test_what_is_called_while_down_is_done_afterwards(
    world: World, tmp_path: Path, command: str, answers: list[str]
) -> None:
    with commanded(world, tmp_path) as ranks:
        with ranks.attempts() as attempt:
            attempt.reach()
            attempt.close()
            attempt.order(WantedState.TEARDOWN)
            ranks.tell(command)
            if command != "scaled":  # which waits elsewhere than at the gate
                await_true(lambda: all(p.waiting() for p in attempt.pages), 10, ranks.everything)
            attempt.rebuild()
        assert ranks.answers() == answers
        name = command.partition(" ")[2]
        if name:
            assert ranks.ask(f"sum {name}") == ["3", "3"]
        if command not in ("finalize", "destroy"):
            ranks.move()
            assert ranks.ask("sum") == ["3", "3"]


REFUSED = {
    "capture": "captured into a CUDA graph",
    "window": "address of a window was given away",
    "device": "device code communicates on it",
    "foreign": "made past the library's functions",
    "signal": "one-sided operations",
    "suspend": "was suspended",
    "revoke": "was revoked",
    "per-thread": "per-thread default stream",
}


@pytest.mark.parametrize("command", REFUSED)
def test_refused_in_words_while_everything_stands(
    world: World, tmp_path: Path, command: str
) -> None:
    with commanded(world, tmp_path) as ranks:
        ranks.ask(command)
        with pytest.raises(Refused, match=REFUSED[command]) as refused:
            ranks.move()
        assert str(refused.value).count("ENOTSUP") == 2
        if command in ("capture", "window", "device", "foreign", "per-thread"):
            assert ranks.ask("sum") == ["3", "3"]  # as if nothing had been


def test_what_nccl_does_with_its_own_is_not_taken_for_an_applications(
    world: World, tmp_path: Path
) -> None:
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("inner") == ["0", "0"]
        ranks.move()
        assert ranks.ask("sum") == ["3", "3"]


def test_what_is_only_estimated_is_not_pending(world: World, tmp_path: Path) -> None:
    """One rank asks what a group would take: with the gate open, and while all is down."""
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("estimate", [0]) == ["0"]
        with ranks.attempts() as attempt:
            attempt.reach()
            attempt.close()
            attempt.order(WantedState.TEARDOWN)
            ranks.tell("estimate", [1])
            attempt.rebuild()
        assert ranks.answers([1]) == ["0"]
        assert ranks.ask("sum") == ["3", "3"]
        ranks.move()
        assert ranks.ask("sum") == ["3", "3"]


def test_one_that_has_failed_does_not_keep_the_others(world: World, tmp_path: Path) -> None:
    """NCCL neither finalizes nor destroys it, and in a group nothing else either."""
    with commanded(world, tmp_path, 3) as ranks:
        assert ranks.ask("init other") == ["0"] * 3
        assert ranks.ask("sum other") == ["6"] * 3
        assert ranks.ask("abort other", [2]) == ["0"]
        await_true(lambda: ranks.ask("error other", [0]) == ["6"], 10, ranks.everything)
        began = time.monotonic()
        with ranks.attempts() as attempt:
            attempt.reach()
            attempt.close()
            attempt.order(WantedState.TEARDOWN)
            for page in attempt.pages:
                assert b"did not end" not in page.answer()["message"]
            attempt.rebuild()
        assert time.monotonic() - began < 10
        assert ranks.ask("sum") == ["6"] * 3
        assert ranks.ask("sum other") == ["-1"] * 3  # it stays down
        assert ranks.ask("destroy other", [0, 1]) == ["0", "0"]
        ranks.move()
        assert ranks.ask("sum") == ["6"] * 3


def test_one_that_is_aborted_while_it_is_down_is_not_rebuilt_for_use(
    world: World, tmp_path: Path
) -> None:
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("init other") == ["0", "0"]
        assert ranks.ask("sum other") == ["3", "3"]
        with ranks.attempts() as attempt:
            attempt.reach()
            attempt.close()
            attempt.order(WantedState.TEARDOWN)
            assert ranks.ask("abort other") == ["0", "0"]
            attempt.rebuild()
        assert ranks.ask("sum") == ["3", "3"]
        assert ranks.ask("sum other") == ["-1", "-1"]
        ranks.move()
        assert ranks.ask("sum") == ["3", "3"]
        with ranks.pages() as pages:
            for page in pages:
                states = {row.generation: row.state for row in nccl(page)}
                assert states[2] is CommunicatorState.LIVE


def test_encryption_is_refused(world_2_32: World, tmp_path: Path) -> None:
    with world_2_32.ranks("commanded", 2, tmp_path / "run") as ranks:
        ranks.await_line("begun")
        assert ranks.ask("encrypt") == ["0", "0"]
        ranks.ask("init world")
        with pytest.raises(Refused, match="encrypted"):
            ranks.move()


def test_graphs_that_are_gone_are_no_hindrance(world: World, tmp_path: Path) -> None:
    """NCCL's destroy hangs while a graph lives that captured it (pytorch#115388, nccl#2351)."""
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("capture") == ["0", "0"]
        with pytest.raises(Refused, match="captured"):
            ranks.move()
        assert ranks.ask("drop") == ["0", "0"]
        ranks.move()
        assert ranks.ask("sum") == ["3", "3"]


def test_a_stream_that_does_not_come_to_rest_is_named(world: World, tmp_path: Path) -> None:
    """Closed without a boundary: one member enqueued what the other will not."""
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("enqueue", [0]) == ["0"]
        with ranks.attempts(limit_s=0.3) as attempt:
            for page in attempt.pages:
                page.give(WantedState.TARGET, attempt.number, attempt.version)
                page.give(WantedState.CLOSED, attempt.number, attempt.version)
            with pytest.raises(Refused, match=r"rank 0: ETIMEDOUT: .* is not idle$"):
                attempt.done(WantedState.CLOSED)
        assert ranks.ask("enqueue", [1]) == ["0"]
        assert ranks.ask("sync") == ["0", "0"]
        ranks.move()
        assert ranks.ask("sum") == ["3", "3"]


def test_the_default_stream_is_drained(world: World, tmp_path: Path) -> None:
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("default") == ["0", "0"]
        ranks.move()
        assert ranks.ask("sum") == ["3", "3"]


def test_a_rebuild_without_all_members_ends_in_time_and_can_be_repeated(
    world: World, tmp_path: Path
) -> None:
    """NCCL's init waits without end for a member that never comes (nccl#2349)."""
    with commanded(world, tmp_path) as ranks, ranks.attempts(limit_s=1) as attempt:
        attempt.reach()
        attempt.close()
        attempt.order(WantedState.TEARDOWN)
        attempt.order(WantedState.FRESH_IDS)
        attempt.spread()
        began = time.monotonic()
        first = attempt.pages[0]
        first.give(WantedState.REBUILD, attempt.number, attempt.version)
        await_true(lambda: first.answer()["done_want"] == WantedState.REBUILD, 10, ranks.everything)
        assert time.monotonic() - began < 4
        answer = first.answer()
        assert b"was not rebuilt in time: a member is missing" in answer["message"]
        assert answer["down"] == 1
        assert [row.state for row in nccl(first)] == [CommunicatorState.DOWN]
        attempt.version += 1
        attempt.order(WantedState.TEARDOWN)
        attempt.rebuild()
        assert ranks.ask("sum") == ["3", "3"]


def test_a_teardown_that_its_peers_do_not_join_ends_by_abort(world: World, tmp_path: Path) -> None:
    with commanded(world, tmp_path) as ranks, ranks.attempts(limit_s=1) as attempt:
        attempt.reach()
        attempt.close()
        first, second = attempt.pages
        first.give(WantedState.TEARDOWN, attempt.number, attempt.version)
        await_true(
            lambda: first.answer()["done_want"] == WantedState.TEARDOWN, 10, ranks.everything
        )
        answer = first.answer()
        assert answer["done_result"] == 0
        assert (
            b"1 of 1 communicators did not end by themselves and were aborted"
            in (answer["message"])
        )
        assert not [n for n in threads(ranks.processes[0].pid) if n.startswith("NCCL")]
        attempt.order(WantedState.TEARDOWN, [second])
        attempt.rebuild()
        assert ranks.ask("sum") == ["3", "3"]


def test_a_silent_agent_leaves_a_job_that_opens_by_itself(world: World, tmp_path: Path) -> None:
    with commanded(world, tmp_path) as ranks:
        with ranks.attempts(lease_ms=200) as attempt:
            attempt.reach()
            attempt.close()
            assert ranks.ask("sum") == ["3", "3"]  # nobody gave an order
            with pytest.raises(Refused, match="ECANCELED: the gate was opened"):
                attempt.order(WantedState.TEARDOWN)
        ranks.move()
        assert ranks.ask("sum") == ["3", "3"]


def test_what_is_down_waits_for_its_agent(world: World, tmp_path: Path) -> None:
    with commanded(world, tmp_path) as ranks, ranks.attempts(lease_ms=100) as attempt:
        attempt.reach()
        attempt.close()
        attempt.order(WantedState.TEARDOWN)
        answered = [ranks.answered(rank) for rank in range(2)]
        ranks.tell("sum")
        with attempt.ranks.pages() as pages:
            await_true(lambda: all(p.waiting() for p in pages), 10, ranks.everything)
        # There is no event that does not happen: three leases and more.
        time.sleep(0.5)
        assert [ranks.answered(rank) for rank in range(2)] == answered
        assert [page.answer()["reopened"] for page in attempt.pages] == [0, 0]
        attempt.rebuild()
        assert ranks.answers() == ["3", "3"]


def test_a_communicator_that_a_member_has_destroyed_is_left(world: World, tmp_path: Path) -> None:
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("init other") == ["0", "0"]
        assert ranks.ask("abort other", [0]) == ["0"]
        with ranks.attempts() as attempt:
            attempt.reach()
            attempt.close()
            attempt.order(WantedState.TEARDOWN)
            attempt.order(WantedState.FRESH_IDS)
            attempt.spread()  # rank 0 has no such communicator: no id, no order for the other
            attempt.order(WantedState.REBUILD)
            for page in attempt.pages:
                page.open()
        assert ranks.ask("sum") == ["3", "3"]
        assert ranks.ask("sum other", [1]) == ["-1"]  # ncclRemoteError
        assert ranks.ask("destroy other", [1]) == ["0"]
        ranks.move()
        assert ranks.ask("sum") == ["3", "3"]


def test_an_abort_while_down_is_done_at_once(world: World, tmp_path: Path) -> None:
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("init other") == ["0", "0"]
        with ranks.attempts() as attempt:
            attempt.reach()
            attempt.close()
            attempt.order(WantedState.TEARDOWN)
            assert ranks.ask("abort other") == ["0", "0"]
            attempt.rebuild()
        assert ranks.ask("sum") == ["3", "3"]
        with ranks.pages() as pages:
            assert [len(nccl(page)) for page in pages] == [1, 1]


def test_finalized_and_not_destroyed(world: World, tmp_path: Path) -> None:
    """Only a destroy may follow: nothing is rebuilt, and the destroy finds nothing to do."""
    with commanded(world, tmp_path) as ranks:
        assert ranks.ask("split other") == ["0", "0"]
        assert ranks.ask("finalize other") == ["0", "0"]
        ranks.move()
        assert ranks.ask("destroy other") == ["0", "0"]
        assert ranks.ask("sum") == ["3", "3"]


def test_a_monitor_that_outlives_communicators_is_remarked(world: World, tmp_path: Path) -> None:
    with commanded(world, tmp_path, NCCL_RAS_ENABLE="1") as ranks, ranks.attempts() as attempt:
        attempt.reach()
        attempt.close()
        attempt.order(WantedState.TEARDOWN)
        assert all(b"NCCL_RAS_ENABLE=0" in page.answer()["message"] for page in attempt.pages)
        attempt.rebuild()
        assert ranks.ask("sum") == ["3", "3"]


def test_nobody_is_torn_down_where_a_rank_is_missing(world: World, tmp_path: Path) -> None:
    """A rank that has died: no boundary, the others go on as they are."""
    with commanded(world, tmp_path, 3) as ranks:
        ranks.tell("sum", [0, 1])
        with ranks.pages() as pages:
            await_true(lambda: all(announced(page) for page in pages[:2]), 10, ranks.everything)
        with pytest.raises(Abandoned), ranks.attempts(limit_s=0.5) as attempt:
            attempt.reach()
        with ranks.pages() as pages:
            assert all(row.state is CommunicatorState.LIVE for p in pages for row in nccl(p))
        ranks.tell("sum", [2])
        assert ranks.answers() == ["6", "6", "6"]
