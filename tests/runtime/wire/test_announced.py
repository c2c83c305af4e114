# SPDX-License-Identifier: Apache-2.0
"""One announced migration at its destination: what is counted, and how long a refusal may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from liveshift.errors import LiveshiftError
from liveshift.runtime.wire.announced import TEXT, Announced, IncomingSeal
from liveshift.runtime.wire.header import (
    MEMORY,
    RATE,
    RATE_LIMIT,
    SEAL,
    WANTS,
    Header,
    Kind,
    PageHeader,
)
from liveshift.runtime.wire.page_lane import ANSWER
from liveshift.runtime.wire.seal import Opener, make_key


class Sink:
    """An inlet and the pages' end."""

    complete = False

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, where: str | int, data: memoryview, tag: bytes = b"") -> None:
        self.written += data

    def wants(self) -> list[tuple[int, int, int]]:
        return []


def announced(limit: int, lanes: int = 2) -> tuple[Announced, Sink]:
    sink = Sink()
    pages: Any = sink
    return Announced("m1", "h0", sink, limit, pages, lanes), sink


def chunk(number: int, data: bytes) -> tuple[Header, memoryview]:
    return Header("m1", number, "output", xxhash.xxh3_64_intdigest(data)), memoryview(data)


def test_a_chunk_that_comes_again_is_answered_with_the_last_that_came() -> None:
    """An acknowledgement of more would let the sender forget what has not come."""
    entry, sink = announced(10)
    entry.accept(*chunk(0, b"12"))
    entry.accept(*chunk(1, b"34"))
    assert entry.accept(*chunk(0, b"12")) == ("ack", 1)
    assert (bytes(sink.written), entry.ordered) == (b"1234", 4)
    assert entry.accept(*chunk(2, b"56")) == ("ack", 2)


def test_bytes_are_counted_on_both_ways_and_nothing_before_they_come() -> None:
    entry, sink = announced(10)
    seal = IncomingSeal(make_key(), 1, "key")
    assert (entry.ordered, entry.paged) == (0, 0)
    assert entry.accept(*chunk(0, b"12345")) == ("ack", 0)
    assert (entry.ordered, entry.paged) == (5, 0)

    def page(number: int, kind: Kind, data: bytes) -> tuple[str, int | str]:
        header = PageHeader("m1", 1, number, kind, 0)
        return entry.take_page(seal, header, memoryview(data), b"tag")

    assert page(0, RATE, b"only to measure with") == ("ack", 0)
    assert (entry.ordered, entry.paged) == (5, 0)
    assert page(1, MEMORY, b"123") == ("ack", 1)
    assert page(2, MEMORY, b"4567") == ("ack", 2)
    assert (entry.ordered, entry.paged) == (5, 7)
    assert bytes(sink.written) == b"123451234567"


def test_no_lane_is_taken_that_was_not_announced() -> None:
    entry, sink = announced(10, lanes=0)
    seal, header = IncomingSeal(make_key(), 1, "key"), PageHeader("m1", 1, 0, MEMORY, 0)
    said = entry.take_page(seal, header, memoryview(b"123"), b"tag")
    assert said == ("refused", "lane 1 of m1 was not announced")
    assert not sink.written


@pytest.mark.parametrize(
    ("stream", "data", "why"),
    [
        (WANTS, b"x", "which this host does not answer"),
        (SEAL, b"", "the key has 0 bytes"),
        ("other", b"", "which this host does not answer"),
    ],
)
def test_a_question_is_whole_or_none(stream: str, data: bytes, why: str) -> None:
    entry, _ = announced(10)
    header = Header("m1", 1, stream, xxhash.xxh3_64_intdigest(data))
    with pytest.raises(LiveshiftError, match=why):
        entry.reply(header, memoryview(data), "key")
    assert entry.seal is None
    nothing = Header("m1", 2, WANTS, xxhash.xxh3_64_intdigest(b""))
    assert entry.reply(nothing, memoryview(b""), "key")[0] == WANTS


def test_what_was_announced_is_taken_to_the_last_byte() -> None:
    entry, _ = announced(10)
    assert entry.accept(*chunk(0, bytes(10))) == ("ack", 0)
    said, why = entry.accept(*chunk(1, b"x"))
    assert said == "refused"
    assert "sent more than the 10 bytes" in str(why)


def test_a_refusal_is_cut_to_what_a_source_takes() -> None:
    key = make_key()
    raw = IncomingSeal(key, 1, "key").answer(2, "refused", "x" * 5000)
    (number,) = ANSWER.unpack_from(raw)
    opened = Opener(key, "answers").open(
        2, number, b"", memoryview(raw)[ANSWER.size :], memoryview(bytearray(8192))
    )
    assert msgspec.msgpack.decode(opened) == ["refused", "x" * 500]
    assert TEXT == 500


def refusing(refuses: str = "") -> Announced:
    """One whose place for pages refuses whatever comes, if it is told to."""

    def write(*_: object) -> None:
        if refuses:
            raise LiveshiftError(refuses)

    inlet: Any = SimpleNamespace(complete=False, write=write)
    pages: Any = SimpleNamespace(write=write, wants=tuple)
    return Announced("m1", "h0", inlet, 100, pages, lanes=2)


def test_a_key_that_is_damaged_is_not_taken() -> None:
    here = refusing()
    header: Any = SimpleNamespace(stream=SEAL, number=1, digest=0)
    with pytest.raises(LiveshiftError, match="the key for pages of memory is damaged"):
        here.reply(header, memoryview(bytes(32)), "h0")
    assert here.seal is None


def test_after_a_refusal_nothing_is_taken_on_any_lane() -> None:
    here = refusing("the disk is full")
    seal: Any = SimpleNamespace(expected=[0, 0, 0])
    page: Any = SimpleNamespace(lane=1, number=0, raw=0, kind=0)
    chunk: Any = SimpleNamespace(number=0, stream="x", digest=xxhash.xxh3_64_intdigest(b"x"))
    for _ in range(2):
        assert here.take_page(seal, page, memoryview(b"x"), b"") == ("refused", "the disk is full")
        assert here.accept(chunk, memoryview(b"x")) == ("refused", "the disk is full")
    assert (here.refused, seal.expected) == ("the disk is full", [0, 0, 0])
    assert (here.ordered, here.paged) == (0, 0)


def test_only_so_much_comes_to_measure_with() -> None:
    here = refusing()
    seal: Any = SimpleNamespace(expected=[0, 0, 0])
    answers = []
    for number, size in enumerate((RATE_LIMIT, 1)):
        page: Any = SimpleNamespace(lane=1, number=number, raw=size, kind=RATE)
        answers.append(here.take_page(seal, page, memoryview(b"x"), b""))
    assert answers[0] == ("ack", 0)
    assert answers[1][0] == "refused"
    assert f"more than {RATE_LIMIT} bytes came only to measure the link" in str(answers[1][1])
    assert here.paged == 0


def test_a_key_for_memory_in_clear_is_taken_only_where_this_host_sends_so_too() -> None:
    key = make_key(clear=True)
    header: Any = SimpleNamespace(stream=SEAL, number=1, digest=xxhash.xxh3_64_intdigest(key))
    here = refusing()
    with pytest.raises(LiveshiftError, match=r"h0 sends memory in clear.*make both files equal"):
        here.reply(header, memoryview(key), "h0")
    assert here.seal is None
    here.clear = True
    assert here.reply(header, memoryview(key), "h0") == (SEAL, 1)
    assert here.seal is not None


def test_another_key_under_a_number_that_was_used_is_not_taken() -> None:
    here = refusing()
    for key in (b"a" * 32, b"b" * 32):
        header: Any = SimpleNamespace(stream=SEAL, number=3, digest=xxhash.xxh3_64_intdigest(key))
        assert here.reply(header, memoryview(key), "h0") == (SEAL, 3)
    assert here.seal is not None
    assert here.seal.key == b"a" * 32
