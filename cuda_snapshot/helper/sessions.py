# SPDX-License-Identifier: Apache-2.0
"""Serves device sessions to agents, each in the thread of its connection."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec

from ...errors import LiveshiftError
from . import handover
from .blocks import Block
from .calls import done, failed
from .channel import Channel
from .device_memory import DeviceMemory
from .process_session import ProcessSession
from .session_client import Blocks, Checksums, GiveUp, Own, TakeBack, Wait

_requests = msgspec.msgpack.Decoder(Wait | Blocks | Checksums | GiveUp | TakeBack | Own)


def serve(channel: Channel, session: ProcessSession, memory: DeviceMemory) -> None:
    """Serve a session until the agent closes the connection."""
    with closing(session):
        while True:
            try:
                raw = channel.receive()
            except (OSError, EOFError):
                return
            try:
                reply = done(_answer(raw, session, memory))
            except Exception as error:
                reply = failed(error)
            try:
                channel.send(msgspec.msgpack.encode(reply))
            except OSError:
                return


def _answer(raw: bytes, session: ProcessSession, memory: DeviceMemory) -> Any:
    try:
        request = _requests.decode(raw)
    except msgspec.MsgspecError as error:
        raise LiveshiftError(f"a session's question is not understood: {error}") from error
    match request:
        case Wait(timeout_s):
            return session.wait(timeout_s)
        case Blocks():
            return [block for block, _ in session.blocks()]
        case Checksums(samples):
            return _checksums(session, samples)
        case GiveUp(key):
            return handover.give_up(session, memory, key)
        case TakeBack(key, keep, gpus):
            return handover.take_back(session, memory, key, keep, dict(gpus))
        case Own():
            return handover.own(session)


def _checksums(session: ProcessSession, samples: int) -> dict[int, int]:
    here: list[Block] = [block for block, with_it in session.blocks() if with_it]
    return {block.address: session.checksum(block, samples) for block in here}
