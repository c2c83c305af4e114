# SPDX-License-Identifier: Apache-2.0
"""One encode and one decode for every message; see the package's docstring for the frame."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from ...errors import LiveshiftError
from .agents import (
    Beat,
    Books,
    Discard,
    End,
    Ended,
    Finish,
    Forget,
    Freeze,
    Frozen,
    Hello,
    Inspect,
    Inspected,
    Locate,
    Moved,
    Precopy,
    Progress,
    Relay,
    Reserve,
    Reserved,
    Restore,
    Resume,
    Signal,
    Start,
    Thaw,
)
from .base import Message
from .people import (
    Events,
    GetEvents,
    GetMigration,
    GetStatus,
    Migrate,
    Migration,
    Named,
    Output,
    Planned,
    ReadOutput,
    Run,
    SetTaint,
    SignalJob,
    Status,
    Untaint,
)

VERSION = 1

ASKS = (
    Start | Signal | End | Forget | Locate | Inspect | Reserve | Precopy | Freeze | Restore
    | Resume | Thaw | Discard | Finish | Progress
    | Hello | Beat | Ended | Relay
    | Run | GetStatus | SetTaint | Untaint | Migrate | GetMigration | ReadOutput | SignalJob
    | GetEvents
)  # fmt: skip
ANSWERS = (
    Inspected | Reserved | Moved | Frozen | Books | Named | Status | Planned | Migration | Output
    | Events
)  # fmt: skip


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
