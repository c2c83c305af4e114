# SPDX-License-Identifier: Apache-2.0
"""One encode and one decode for every message; see the package's docstring for the frame."""

from __future__ import annotations

import functools
from typing import Any, Union

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ...errors import LiveshiftError
from . import agents, costs, gates, people, snapshots  # noqa: F401 (they define the messages)
from .base import Answer, Message
from .request_text import request_to

VERSION = 27

LIMIT = 64 << 20
"""A frame has at most this many bytes. Long ones hold a large cluster's status, or an environment
with long variables."""


# The tag in a frame selects one of these.
ASKS: Any = Union[tuple(kind for kind in Message.__subclasses__() if kind is not Answer)]  # noqa: UP007 (made of values)
ANSWERS: Any = Union[tuple(Answer.__subclasses__())]  # noqa: UP007 (made of values)


class Frame(msgspec.Struct, frozen=True):
    """One decoded frame: either ``body`` (a request), or ``answer``, or ``error`` is in use."""

    id: int
    body: Message | None
    answer: Message | None
    error: tuple[str, str, str | None] | None


class _Envelope(msgspec.Struct, frozen=True):
    v: int
    id: int
    body: Raw | UnsetType = UNSET
    ok: Raw | UnsetType = UNSET
    error: tuple[str, str, str | None] | UnsetType = UNSET


# They decode straight into the types, so a peer's data makes no tree of small objects. Each is made
# when it is first used: a command never decodes a request.
_envelope = msgspec.msgpack.Decoder(_Envelope)


@functools.cache
def _requests() -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(ASKS)


@functools.cache
def _answers() -> msgspec.msgpack.Decoder[Message | None]:
    return msgspec.msgpack.Decoder(Union[ANSWERS, None])  # noqa: UP007 (made of values)


def encode_request(number: int, body: Message) -> bytes:
    """Raises LiveshiftError if a text in it is no UTF-8: what is asked for may not be changed."""
    try:
        return msgspec.msgpack.encode({"v": VERSION, "id": number, "body": body})
    except UnicodeEncodeError as error:
        raise LiveshiftError(
            f"{request_to(body)} cannot be sent: {error.object!r} is not UTF-8",
            hint="give it a name in UTF-8",
        ) from None


def encode_answer(number: int, answer: Message | None) -> bytes:
    return _encode_told({"v": VERSION, "id": number, "ok": answer})


def encode_error(number: int, error: tuple[str, str, str | None]) -> bytes:
    return _encode_told({"v": VERSION, "id": number, "error": error})


def _encode_told(frame: dict[str, Any]) -> bytes:
    """Names of a job's files and threads are bytes. One that is no UTF-8 must not keep an answer
    from being sent: U+FFFD stands for each such byte."""
    try:
        return msgspec.msgpack.encode(frame)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_as_utf8(msgspec.to_builtins(frame, builtin_types=(bytes,))))


def _as_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_as_utf8(key): _as_utf8(each) for key, each in value.items()}
    return [_as_utf8(each) for each in value] if isinstance(value, list | tuple) else value


def decode(raw: bytes | memoryview) -> Frame:
    """Decode a frame; raises LiveshiftError with the value that is wrong."""
    if len(raw) > LIMIT:
        raise LiveshiftError(f"a peer sent a message of {len(raw)} bytes, at most {LIMIT} are read")
    try:
        frame = _envelope.decode(raw)
        if frame.v != VERSION:
            raise LiveshiftError(
                f"the peer speaks protocol version {frame.v}, this is version {VERSION}",
                hint="run the same version of liveshift on every host",
            )
        match frame.body, frame.ok, frame.error:
            case Raw() as body, UnsetType(), UnsetType():
                return Frame(frame.id, _requests().decode(body), None, None)
            case UnsetType(), Raw() as ok, UnsetType():
                return Frame(frame.id, None, _answers().decode(ok), None)
            case UnsetType(), UnsetType(), tuple() as error:
                return Frame(frame.id, None, None, error)
        raise ValueError("expected one of `body`, `ok` and `error`")
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise LiveshiftError(f"a peer sent a message that is not understood: {e}") from e
