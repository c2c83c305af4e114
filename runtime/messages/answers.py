# SPDX-License-Identifier: Apache-2.0
"""Checks that the answer of a daemon has the type that its request asks for."""

from __future__ import annotations

from typing import TypeVar

from ...errors import Unreachable
from .base import Message
from .request_text import request_to

A = TypeVar("A", bound=Message)


def expected(kind: type[A], peer: str, request: Message, answer: Message | None) -> A:
    """Return the answer of ``peer``. Raises Unreachable if it is of another type: then a daemon
    answers that does not speak our protocol."""
    if not isinstance(answer, kind):
        raise Unreachable(
            f"{peer} answered {request_to(request)} with {type(answer).__name__},"
            f" not {kind.__name__}"
        )
    return answer
