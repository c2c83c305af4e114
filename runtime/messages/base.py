# SPDX-License-Identifier: Apache-2.0
"""The base of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


class Answer(Message, frozen=True):
    """Base of all messages that answer; the other messages are requests."""
