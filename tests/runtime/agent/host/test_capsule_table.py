# SPDX-License-Identifier: Apache-2.0
"""The capsules of a host: a subnet is one job's alone, whatever this host has missed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fleet_scene import CLUSTER

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.network import network
from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import Refused
from liveshift.runtime.agent.host import carried_out
from liveshift.runtime.agent.host.capsule_table import CapsuleTable
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import Book, Forget, Locate, ReadOutput

SUBNET = "10.99.6.0/24"


@dataclass
class Capsule:
    """One of the old job; ``code`` is None while its command runs."""

    done: list[str]
    code: int | None = 0
    spec: Any = field(default_factory=lambda: SimpleNamespace(job="old", name="old/0"))
    overlay: Overlay = field(default_factory=lambda: Overlay(7, SUBNET))
    leaving: bool = False

    def remove(self) -> None:
        self.done.append("remove")


async def no_migrations(book: Book) -> None:
    """None of them holds anything."""


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def capsule_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: list[str]) -> CapsuleTable:
    """It has the book of a job that has ended, in subnet 7."""
    cluster = config.parse(CLUSTER.replace("{state}", str(tmp_path))).cluster
    made = CapsuleTable(cluster, "h0", lambda _: None, no_migrations)
    made.books["old"] = Book("old", 7, SUBNET, {"10.99.6.1": ("h0", 1)})
    monkeypatch.setattr(network, "lower_overlay", lambda overlay: done.append("lower"))
    monkeypatch.setattr(network, "locate", lambda overlay, table: done.append("locate"))
    monkeypatch.setattr(
        CapsuleFactory, "raise_overlay", lambda self, book, **_: done.append("raise")
    )
    monkeypatch.setattr(carried_out, "forget_job", lambda factory, job: None)
    return made


NEW = Book("new", 7, SUBNET, {"10.99.6.1": ("h1", 2)})


def test_what_an_earlier_job_left_goes_before_a_new_one_has_its_subnet(
    capsule_table: CapsuleTable, done: list[str]
) -> None:
    capsule_table.capsules["old/0"] = cast(Any, Capsule(done))
    asyncio.run(capsule_table.locate(Locate(NEW)))
    assert done == ["remove", "lower", "raise", "locate"]
    assert capsule_table.capsules == {}
    assert set(capsule_table.books) == {"new"}


def test_a_late_word_does_not_take_the_subnet_from_the_new_job(
    capsule_table: CapsuleTable, done: list[str]
) -> None:
    capsule_table.books["new"] = NEW
    asyncio.run(capsule_table.forget_job(Forget("old")))
    assert "lower" not in done
    asyncio.run(capsule_table.forget_job(Forget("new")))
    assert done[-1] == "lower"


def test_a_subnet_is_not_taken_from_what_runs_here(
    capsule_table: CapsuleTable, done: list[str]
) -> None:
    capsule_table.capsules["old/0"] = cast(Any, Capsule(done, code=None))
    with pytest.raises(Refused, match=r"h0 still runs old/0 in the subnet 10\.99\.6\.0/24") as told:
        asyncio.run(capsule_table.locate(Locate(NEW)))
    assert told.value.hint == "`liveshift stop old --unknown h0` ends it"
    assert (done, set(capsule_table.books)) == ([], {"old"})


@pytest.mark.parametrize("rewound", [False, True])
def test_who_reads_output_is_told_of_a_rewind_before_the_capsule_prints_again(
    capsule_table: CapsuleTable, tmp_path: Path, rewound: bool
) -> None:
    """And not of bytes that are missing before an empty file: more may be missing by then."""
    log = tmp_path / "log"
    log.mkdir()
    begins = output.REWIND if rewound else 100
    output.segment(log, 0).write_bytes(b"")
    output.segment(log, begins).touch()
    capsule = SimpleNamespace(code=None, read_output=partial(output.read, log, limit=1000))
    capsule_table.capsules["gpt/0"] = cast(Any, capsule)
    told = asyncio.run(capsule_table.read_output(ReadOutput("gpt/0", 40, 0)))
    expected = (begins, begins - 40) if rewound else (40, 0)
    assert (told.data, told.next, told.dropped) == (b"", *expected)
    after = asyncio.run(capsule_table.read_output(ReadOutput("gpt/0", told.next, 0)))
    assert (after.next, after.dropped) == (told.next, 0), "it is told once"
