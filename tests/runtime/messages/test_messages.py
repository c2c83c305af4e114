# SPDX-License-Identifier: Apache-2.0
"""Every message survives the way over a socket, and nothing that is none gets through."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveshift.errors import LiveshiftError
from liveshift.runtime import messages
from liveshift.runtime.messages import (
    VERSION,
    Message,
    decode,
    encode_answer,
    encode_error,
    encode_request,
    frames,
)
from liveshift.runtime.messages.base import Answer

ASKS = typing.get_args(frames.ASKS)
ANSWERS = typing.get_args(frames.ANSWERS)
ANSWERED = re.compile(r"answers\s+([A-Z]\w+)")

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=40),
    type(None): st.none(),
}


def later(hint: Any) -> st.SearchStrategy[Any]:
    """Of a type that may contain itself."""
    return st.deferred(lambda: values(hint))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, so that a field added later is tested without a word here."""
    if hint in SCALARS:
        return SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    assert dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct), hint
    fields = typing.get_type_hints(hint)
    names = getattr(hint, "__struct_fields__", tuple(fields))
    return st.builds(hint, **{name: later(fields[name]) for name in names})


def test_what_a_request_is_answered_with_can_be_sent_as_an_answer() -> None:
    """Each request says what that is."""
    said = {name for asked in ASKS for name in ANSWERED.findall(asked.__doc__ or "")} - {"None"}
    assert len(said) > 20
    assert said <= {answer.__name__ for answer in ANSWERS}


def test_every_message_can_be_sent() -> None:
    def below(base: type) -> set[type]:
        subclasses: list[type] = base.__subclasses__()
        return {base, *(c for sub in subclasses for c in below(sub))}

    assert below(Message) - {Message, Answer} == {*ASKS, *ANSWERS}
    assert not {*ASKS} & {*ANSWERS}


@pytest.mark.parametrize("kind", [*ASKS, *ANSWERS], ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[Message]) -> None:
    @settings(max_examples=20, deadline=None, database=None)
    @given(st.integers(0, 2**53), values(kind))
    def there_and_back(number: int, message: Message) -> None:
        if kind in ASKS:
            frame = decode(memoryview(encode_request(number, message)))
            assert frame == messages.Frame(number, message, None, None)
        else:
            frame = decode(encode_answer(number, message))
            assert frame == messages.Frame(number, None, message, None)

    there_and_back()


def test_another_library_reads_what_is_sent() -> None:
    assert msgpack.unpackb(encode_request(7, messages.Untaint("h1"))) == {
        "v": VERSION,
        "id": 7,
        "body": {"t": "Untaint", "host": "h1"},
    }
    error = ("Refused", "no", None)
    assert msgpack.unpackb(encode_error(4, error)) == {"v": VERSION, "id": 4, "error": [*error]}


def test_a_name_that_is_no_utf_8_keeps_no_answer_from_being_sent() -> None:
    odd = "the rank maps /tmp/caf\udce9.bin"
    error = decode(encode_error(7, ("Refused", odd, None))).error
    assert error == ("Refused", "the rank maps /tmp/caf\ufffd.bin", None)
    answer = messages.Evacuating(
        "h1", 3.0, 0.0, False, [messages.Departing("a", 0, True, error=odd)]
    )
    read = decode(encode_answer(7, answer)).answer
    assert isinstance(read, messages.Evacuating)
    assert read.capsules[0].error == error[1]
    mixed = frames._encode_told({"ok": {odd: b"\xff\x00"}})
    assert msgpack.unpackb(mixed) == {"ok": {error[1]: b"\xff\x00"}}, "bytes stay bytes"
    with pytest.raises(LiveshiftError, match=r"start a job cannot be sent: .*is not UTF-8"):
        encode_request(7, messages.RunJob("gpt", 1, ["caf\udce9"], {}, "/", 0, []))


def test_errors_and_empty_answers() -> None:
    assert decode(encode_answer(3, None)) == messages.Frame(3, None, None, None)
    error = ("Refused", "no", None)
    assert decode(encode_error(4, error)) == messages.Frame(4, None, None, error)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["v", "id", "body", "ok", "error", "t"]), inner, max_size=5
        )
    ),
    max_leaves=12,
)
almost = st.fixed_dictionaries(
    {"v": st.just(VERSION), "id": st.integers(0, 9) | plain},
    optional={"body": plain, "ok": plain, "error": plain},
)


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=60) | (plain | almost).map(lambda thing: msgpack.packb(thing)))
def test_nonsense_is_refused_in_words_or_understood(raw: bytes) -> None:
    with contextlib.suppress(LiveshiftError):
        assert isinstance(decode(raw), messages.Frame)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ({"v": 99, "id": 1, "ok": None}, f"version 99, this is version {VERSION}"),
        ({"id": 1, "ok": None}, "missing required field `v`"),
        ({"v": VERSION, "id": 1}, "expected one of `body`, `ok` and `error`"),
        ({"v": VERSION, "id": 1, "ok": None, "error": ["a", "b", None]}, "expected one of"),
        ({"v": VERSION, "id": 1, "body": {"t": "Explode"}}, "'Explode'"),
        ({"v": VERSION, "id": 1, "body": {"t": "End"}}, "missing required field `capsule`"),
        ({"v": VERSION, "id": 1, "body": {"t": "End", "capsule": 7}}, "Expected `str`, got `int`"),
        ({"v": VERSION, "id": 1, "body": {"t": "End", "capsule": "a", "now": 1}}, "field `now`"),
        ({"v": VERSION, "id": 1, "body": {"t": "Named", "name": "gpt"}}, "'Named'"),  # an answer
        ({"v": VERSION, "id": 1, "ok": {"t": "End", "capsule": "gpt/0"}}, "'End'"),  # an ask
    ],
)
def test_what_is_wrong_is_named(frame: dict[str, object], words: str) -> None:
    with pytest.raises(LiveshiftError, match=words.replace("(", r"\(")):
        decode(msgpack.packb(frame))


def test_deep_and_large_frames_are_refused() -> None:
    for raw in (
        b"\x91" * 100_000,
        msgpack.packb({"v": VERSION, "id": 1})[:-1] + b"\xa4body" + b"\x91" * 100_000,
    ):
        with pytest.raises(LiveshiftError, match="not understood"):
            decode(raw)
    with pytest.raises(LiveshiftError, match="at most"):
        decode(bytes(frames.LIMIT + 1))
