# SPDX-License-Identifier: Apache-2.0
"""The streams that carry a capsule's own memory: ``memory:<lane>`` with its pages, any number of
times and in any order, and at last ``memory``, which says which pages there are."""

from __future__ import annotations

import msgspec

from ..criu_glue.memory.table import ProcessPages
from ..errors import StepFailed

TABLE = "memory"
PAGES = "memory:"

LIMIT = 64 << 20
"""Bytes of a table: a run of pages takes some 12, and a process of 8 GB has a few thousand."""


def decode_table(raw: bytes) -> dict[int, ProcessPages]:
    """Raises StepFailed for bytes that are none; what it says is the store's to judge."""
    try:
        return msgspec.msgpack.decode(raw, type=dict[int, ProcessPages])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StepFailed("ship", f"a table of pages that is not understood: {error}") from error
