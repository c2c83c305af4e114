# SPDX-License-Identifier: Apache-2.0
"""What is sealed opens with its key, in its place and direction, as it was; nothing else does."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveshift.errors import LiveshiftError
from liveshift.runtime.wire.header import CHUNK
from liveshift.runtime.wire.seal import (
    CLEAR_KEY,
    KEY,
    TAG,
    Opener,
    Sealer,
    Unsealed,
    in_clear,
    make_key,
)

HEAD = b"head"
DATA = b"a page of memory"


def sealed(sealer: Sealer, lane: int = 1, number: int = 0, data: bytes = DATA) -> bytes:
    return bytes(sealer.seal(lane, number, HEAD, data, memoryview(bytearray(len(data) + TAG))))


def opened(opener: Opener, raw: bytes, lane: int = 1, number: int = 0, head: bytes = HEAD) -> bytes:
    into = memoryview(bytearray(CHUNK))
    return bytes(opener.open(lane, number, head, memoryview(raw), into))


BOTH = pytest.mark.parametrize("clear", [False, True], ids=["sealed", "in clear"])


@BOTH
@given(
    st.binary(max_size=300), st.binary(max_size=50), st.integers(1, 32), st.integers(0, 2**63 - 1)
)
def test_it_comes_out_as_it_went_in(
    clear: bool, data: bytes, head: bytes, lane: int, number: int
) -> None:
    key = make_key(clear=clear)
    into = memoryview(bytearray(400))
    raw = bytes(Sealer(key, "pages").seal(lane, number, head, data, into))
    assert len(raw) == len(data) + TAG
    assert opened(Opener(key, "pages"), raw, lane, number, head) == data


@BOTH
def test_the_largest_chunk_and_the_empty_one(clear: bool) -> None:
    key = make_key(clear=clear)
    sealer, opener = Sealer(key, "pages"), Opener(key, "pages")
    largest = os.urandom(CHUNK)
    assert opened(opener, sealed(sealer, 1, 0, largest), 1, 0) == largest
    assert opened(opener, sealed(sealer, 1, 1, b""), 1, 1) == b""
    with pytest.raises(Unsealed, match=f"{CHUNK + TAG + 1} bytes"):
        opened(opener, bytes(CHUNK + TAG + 1), 1, 2)


@BOTH
def test_every_bit_counts(clear: bool) -> None:
    key = make_key(clear=clear)
    raw, opener = sealed(Sealer(key, "pages")), Opener(key, "pages")
    for at in range(8 * len(raw)):
        bad = bytearray(raw)
        bad[at // 8] ^= 1 << at % 8
        with pytest.raises(Unsealed, match="number 0 of lane 1 does not open"):
            opened(opener, bytes(bad))
    for cut in range(len(raw)):
        with pytest.raises(Unsealed):
            opened(opener, raw[:cut])
    for head in (b"", b"heae", HEAD + b"\0", HEAD[:-1]):
        with pytest.raises(Unsealed):
            opened(opener, raw, head=head)
    assert opened(opener, raw) == DATA


@BOTH
def test_it_opens_in_its_place_only(clear: bool) -> None:
    key = make_key(clear=clear)
    raw, opener = sealed(Sealer(key, "pages"), 3, 7), Opener(key, "pages")
    assert opened(opener, raw, 3, 7) == DATA
    for lane, number in ((3, 6), (3, 8), (2, 7), (7, 3), (0, 7), (3, 7 + (1 << 32))):
        with pytest.raises(Unsealed):
            opened(opener, raw, lane, number)


@BOTH
def test_no_other_key_and_no_other_direction_opens_it(clear: bool) -> None:
    key = make_key(clear=clear)
    raw = sealed(Sealer(key, "pages"))
    for other in (Opener(make_key(clear=clear), "pages"), Opener(key, "answers")):
        with pytest.raises(Unsealed):
            opened(other, raw)
    assert sealed(Sealer(key, "answers")) != raw


@BOTH
def test_a_number_is_sealed_once(clear: bool) -> None:
    key = make_key(clear=clear)
    sealer = Sealer(key, "pages")
    seen = {sealed(sealer, lane, n, bytes(32)) for lane in (1, 2) for n in (0, 1, 5)}
    assert len(seen) == 6, "the same bytes, each time under a nonce of its own"
    for number in (0, 1, 4, 5):
        with pytest.raises(ValueError, match=f"number {number} of lane 2 was sealed before"):
            sealed(sealer, 2, number)
    sealed(sealer, 2, 6)


def test_only_a_key_of_its_own_length_sends_in_clear() -> None:
    data = os.urandom(64)
    hidden, clear = (sealed(Sealer(make_key(clear=c), "pages"), data=data) for c in (False, True))
    assert data not in hidden
    assert clear[:64] == data
    key = make_key(clear=True)
    assert (len(key), in_clear(key), in_clear(make_key())) == (CLEAR_KEY, True, False)
    with pytest.raises(Unsealed):
        opened(Opener(key[:KEY], "pages"), sealed(Sealer(key, "pages")))


def test_keys_are_made_anew_and_are_of_a_known_size() -> None:
    assert len({make_key() for _ in range(100)}) == 100
    for size in (0, KEY - 1, CLEAR_KEY + 1):
        with pytest.raises(LiveshiftError, match=f"the key has {size} bytes"):
            Opener(bytes(size), "pages")
