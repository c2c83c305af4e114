# SPDX-License-Identifier: Apache-2.0
"""One encode and one decode for every message; see the package's docstring for the frame."""

from __future__ import annotations

from typing import Any, Union

import msgpack
import msgspec

from ...errors import LiveshiftError
from . import agents, people
from .base import Answer, Message

VERSION = 2


def _below(base: type[Message], *but: type[Message]) -> Any:
    """The union of all messages below a base; the tag says which one a frame holds."""
    every = [c for module in (agents, people) for c in vars(module).values() if isinstance(c, type)]
    kinds = [c for c in every if issubclass(c, base) and c is not base and not issubclass(c, but)]
    return Union[tuple(kinds)]  # noqa: UP007 (made of values)


ASKS = _below(Message, Answer)
ANSWERS = _below(Answer)


class Frame(msgspec.Struct, frozen=True):
    """One decoded frame: exactly one of ``body`` (an ask), ``answer`` and ``error`` counts."""

    id: int
    body: Message | None
    answer: Message | None
    error: tuple[str, str, str | None] | None


def encode_ask(number: int, body: Message) -> bytes:
    return _pack(
        {"v": VERSION, "id": number, "body": msgspec.to_builtins(body, builtin_types=(bytes,))}
    )


def encode_answer(number: int, answer: Message | None) -> bytes:
    ok = msgspec.to_builtins(answer, builtin_types=(bytes,))
    return _pack({"v": VERSION, "id": number, "ok": ok})


def encode_error(number: int, error: tuple[str, str, str | None]) -> bytes:
    return _pack({"v": VERSION, "id": number, "error": list(error)})


def decode(raw: bytes | memoryview) -> Frame:
    """Take a frame apart; raises LiveshiftError naming the value that is wrong."""
    try:
        frame: Any = msgpack.unpackb(raw, strict_map_key=False)
        if frame["v"] != VERSION:
            raise LiveshiftError(
                f"the peer speaks protocol version {frame['v']}, this is version {VERSION}",
                hint="run the same version of liveshift on every host",
            )
        number = int(frame["id"])
        if "body" in frame:
            return Frame(number, msgspec.convert(frame["body"], ASKS), None, None)
        if "error" in frame:
            kind, message, hint = frame["error"]
            return Frame(number, None, None, (str(kind), str(message), hint))
        answer = None if frame["ok"] is None else msgspec.convert(frame["ok"], ANSWERS)
        return Frame(number, None, answer, None)
    except (msgspec.ValidationError, msgpack.UnpackException, KeyError, TypeError, ValueError) as e:
        raise LiveshiftError(f"a peer sent a message that is not understood: {e}") from e


def _pack(frame: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb(frame, use_bin_type=True))
