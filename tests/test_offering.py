# SPDX-License-Identifier: Apache-2.0
"""What a destination offers of the memory of capsules that are there, and to whom."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import xxhash
from housed import Resident, Room, Spec
from memory_parts import REFERENCE, chunk, reference
from memory_subject import MANY, subject
from test_inbox import Host
from test_memory_store import BASE, PAGE

from liveshift.criu_glue.memory.store import Want
from liveshift.errors import StepFailed
from liveshift.runtime import offering

OWN = [Room(os.getpid())]
"""The processes below this one."""


def content(number: int) -> bytes:
    """Of the subject's pages."""
    return (number + 1).to_bytes(8, "little") * 512


def lower(number: int) -> int:
    return xxhash.xxh3_128_intdigest(content(number)) & (1 << 64) - 1


def offered(raw: bytes) -> set[int]:
    return {n for (n,) in struct.iter_unpack("<Q", raw)}


def test_only_others_of_the_same_job_that_run_are_looked_at() -> None:
    here = [
        Resident(Spec("gpt", "gpt/0"), Room(1)),
        Resident(Spec("gpt", "gpt/1"), Room(2)),
        Resident(Spec("gpt", "gpt/2"), Room(3), code=0),
        Resident(Spec("other", "other/0"), Room(4)),
        Resident(Spec("gpt", "gpt/3"), Room(5)),
    ]
    found = offering.siblings(Spec("gpt", "gpt/1"), here)  # type: ignore[arg-type]
    assert found == [Room(1), Room(5)]
    assert offering.siblings(Spec("gp", "gp/1"), here) == []  # type: ignore[arg-type]
    assert offering.look([]) is None
    assert offering.look([Room(1 << 30)]) is None  # type: ignore[list-item]


@pytest.mark.root
def test_its_pages_are_offered_as_far_as_the_limits_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with subject():
        donors = offering.look(OWN)  # type: ignore[arg-type]
        assert donors is not None
        assert offered(donors.offer()) > {lower(n) for n in range(MANY)}
        donors.close()
        assert offering.look(OWN, seconds=0.0) is None  # type: ignore[arg-type]
        monkeypatch.setattr(offering, "MEMORY_LIMIT", 100 * PAGE)
        few = offering.look(OWN)  # type: ignore[arg-type]
        assert few is not None
        assert len(few.offer()) <= 800
        few.close()


@pytest.mark.root
def test_what_was_offered_is_taken_from_there_unless_it_has_gone(tmp_path: Path) -> None:
    host = Host(tmp_path)
    inbox = host.inbox
    inbox.memory_limit = 16 << 20
    with subject() as donor:
        inbox.donors = offering.look(OWN)  # type: ignore[arg-type]
        assert inbox.pages.wants() == []
        donor.do("put(8, 1)")
        names = b"".join(reference(content(n), 0, 0) for n in (7, 8, 9))
        raw = chunk(5, [(BASE, 3, REFERENCE)], names)
        inbox.pages.write(1, memoryview(raw), bytes(16))
        assert inbox.pages.wants() == [Want(5, BASE + PAGE, 1)]
        inbox.close()
        assert inbox.pages.wants() == []
        assert inbox.memory is not None
        assert inbox.donors is not None
        more = chunk(5, [(BASE + 3 * PAGE, 1, REFERENCE)], reference(content(10), 0, 0))
        inbox.memory.write(more)
        assert inbox.memory.wants() == [Want(5, BASE + PAGE, 1)], "the store looks there still"
        inbox.forget_memory()
        with pytest.raises(StepFailed, match="was let go of"):
            inbox.donors.fetch(0)
