# SPDX-License-Identifier: Apache-2.0
"""How the journal keeps what a person asked `run` to start.

A message carries its class's name as a tag. The journal outlives that name, so the tag is neither
stored nor read: an orchestrator of an earlier build, where the class was called Run, reads a
journal of this one, and this one reads that one's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..messages import RunJob

TAG = "t"
"""The field in which a message carries the name of its class (:mod:`..messages.base`)."""


class _Spec(msgspec.Struct):
    uid: int
    run: dict[str, Any]


def encode(request: RunJob, uid: int) -> bytes:
    """``uid``: the user whom the command runs as."""
    run = msgspec.to_builtins(request)
    del run[TAG]
    return msgspec.msgpack.encode({"uid": uid, "run": run})


def decode(spec: bytes) -> tuple[RunJob, int]:
    """The request and its user. Raises msgspec.DecodeError if ``spec`` is something else."""
    raw = msgspec.msgpack.decode(spec, type=_Spec)
    raw.run.pop(TAG, None)
    return msgspec.convert(raw.run, RunJob), raw.uid
