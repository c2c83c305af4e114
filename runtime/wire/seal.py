# SPDX-License-Identifier: Apache-2.0
"""How pages are sealed on their way: AES-256-GCM, with a key that one source has made for once.

The key goes over lane 0, which CURVE encrypts and authenticates; from it follow two, one for each
direction, so that nothing which comes can be sent back as an answer. The nonce is the lane (32
bits) and a number that only grows on it (64 bits), big endian. A number is sealed once: what is
sent again is what was sealed before, so no nonce ever sees two contents (NIST SP 800-38D, 8.2.1).

Where the network is trusted (``wire.seal = "off"``) the source makes a key of another length, and
both ends put a tag in place of the seal. The bytes then go in clear. The tag shows that a chunk is
whole and that its sender knows the key; against somebody who can change bytes on their way it does
not help, as the hash of a chunk's bytes is none of cryptography.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Literal, Protocol

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import LiveshiftError

KEY = 32
CLEAR_KEY = KEY + 1
"""Bytes of a key under which messages go in clear, with a tag."""
TAG = 16
"""Bytes by which sealing makes a message longer."""

Direction = Literal["pages", "answers"]

_NONCE = struct.Struct(">IQ")


class Unsealed(LiveshiftError):
    """What has come was not sealed by the other end, or not as what it says to be."""


def make_key(*, clear: bool = False) -> bytes:
    """For one migration. ``clear``: its messages get a tag and are not encrypted."""
    return os.urandom(CLEAR_KEY if clear else KEY)


def in_clear(key: bytes) -> bool:
    """Whether messages under this key are not encrypted."""
    return len(key) == CLEAR_KEY


class Sealer:
    """Seals one direction's messages. Several threads may use it, each for lanes of its own."""

    def __init__(self, key: bytes, direction: Direction) -> None:
        self._cipher = _cipher(key, direction)
        self._next: dict[int, int] = {}

    def seal(
        self, lane: int, number: int, beside: bytes, data: bytes | memoryview, into: memoryview
    ) -> memoryview:
        """The sealed message, at the beginning of ``into``; ``beside``, which goes in clear, is
        sealed with it. Raises ValueError for a number that is not above the lane's last."""
        if number < self._next.get(lane, 0):
            raise ValueError(f"number {number} of lane {lane} was sealed before")
        self._next[lane] = number + 1
        sealed = into[: len(data) + TAG]
        self._cipher.encrypt_into(_NONCE.pack(lane, number), data, beside, sealed)
        return sealed


class Opener:
    """Opens what the other end's :class:`Sealer` for the same direction has sealed."""

    def __init__(self, key: bytes, direction: Direction) -> None:
        self._cipher = _cipher(key, direction)

    def open(
        self, lane: int, number: int, beside: bytes | memoryview, sealed: memoryview,
        into: memoryview,
    ) -> memoryview:  # fmt: skip
        """The message, at the beginning of ``into``. Raises Unsealed; what is there then was made
        of bytes that anybody may have sent."""
        size = len(sealed) - TAG
        if not 0 <= size <= len(into):
            raise Unsealed(f"a sealed message cannot have {len(sealed)} bytes")
        data = into[:size]
        try:
            self._cipher.decrypt_into(_NONCE.pack(lane, number), sealed, beside, data)
        except InvalidTag:
            raise Unsealed(f"number {number} of lane {lane} does not open") from None
        return data


class _Cipher(Protocol):
    def encrypt_into(
        self, nonce: bytes, data: bytes | memoryview, beside: bytes, into: memoryview
    ) -> int: ...

    def decrypt_into(
        self, nonce: bytes, sealed: memoryview, beside: bytes | memoryview, into: memoryview
    ) -> int: ...


class _Tagged:
    """Stands where AES-GCM stands, for messages in clear."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encrypt_into(
        self, nonce: bytes, data: bytes | memoryview, beside: bytes, into: memoryview
    ) -> int:
        into[: len(data)] = data
        into[len(data) :] = self._tag(nonce, into[: len(data)], beside)
        return len(into)

    def decrypt_into(
        self, nonce: bytes, sealed: memoryview, beside: bytes | memoryview, into: memoryview
    ) -> int:
        into[:] = sealed[:-TAG]
        if not hmac.compare_digest(sealed[-TAG:], self._tag(nonce, into, beside)):
            raise InvalidTag
        return len(into)

    def _tag(self, nonce: bytes, data: memoryview, beside: bytes | memoryview) -> bytes:
        made = hashlib.blake2b(nonce, key=self._key, digest_size=TAG)
        made.update(xxhash.xxh3_128_digest(data) + len(data).to_bytes(8, "big"))
        made.update(beside)
        return made.digest()


def _cipher(key: bytes, direction: Direction) -> _Cipher:
    """Raises LiveshiftError for bytes that are no key."""
    if len(key) not in (KEY, CLEAR_KEY):
        raise LiveshiftError(f"the key has {len(key)} bytes, expected {KEY}")
    info = (b"liveshift clear " if in_clear(key) else b"liveshift ") + direction.encode()
    derived = HKDF(SHA256(), KEY, salt=None, info=info).derive(key)
    return _Tagged(derived) if in_clear(key) else AESGCM(derived)
