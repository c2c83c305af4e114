# SPDX-License-Identifier: Apache-2.0
"""How pages are sealed on their way: AES-256-GCM, with a key that one source makes for one use.

The source sends the key over lane 0, which CURVE encrypts and authenticates. Both ends derive two
keys from it, one for each direction, so that a message cannot be sent back as an answer. The nonce
is the lane (32 bits) and a number that only grows on the lane (64 bits), big endian. Each number is
sealed once. A chunk that is sent again is the same sealed bytes, so a nonce never protects two
contents (NIST SP 800-38D, 8.2.1).

Where the network is trusted (``wire.seal = "off"``) the source makes a key of another length. Then
the bytes go in clear, and both ends put a tag in place of the seal. The tag shows that a chunk is
whole and that its sender knows the key. It does not protect against an attacker who can change
bytes on their way, because the hash of a chunk's bytes is not a cryptographic one.
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
"""The length in bytes of a key under which messages go in clear, with a tag."""
TAG = 16
"""A seal makes a message this many bytes longer."""

Direction = Literal["pages", "answers"]

_NONCE = struct.Struct(">IQ")


class Unsealed(LiveshiftError):
    """A message was not sealed by the other end, or not for the lane and number that it states."""


def make_key(*, clear: bool = False) -> bytes:
    """Make the key of one migration. ``clear``: its messages get a tag and are not encrypted."""
    return os.urandom(CLEAR_KEY if clear else KEY)


def in_clear(key: bytes) -> bool:
    """Whether messages under this key are not encrypted."""
    return len(key) == CLEAR_KEY


class Sealer:
    """Seals the messages of one direction. Several threads may use it, each for its own lanes."""

    def __init__(self, key: bytes, direction: Direction) -> None:
        self._cipher = _cipher(key, direction)
        self._next: dict[int, int] = {}

    def seal(
        self, lane: int, number: int, beside: bytes, data: bytes | memoryview, into: memoryview
    ) -> memoryview:
        """Seal a message into the beginning of ``into`` and return that part. ``beside`` goes in
        clear and is authenticated. Raises ValueError for a number not above the lane's last."""
        if number < self._next.get(lane, 0):
            raise ValueError(f"number {number} of lane {lane} was sealed before")
        self._next[lane] = number + 1
        sealed = into[: len(data) + TAG]
        self._cipher.encrypt_into(_NONCE.pack(lane, number), data, beside, sealed)
        return sealed


class Opener:
    """Opens the messages that the other end's :class:`Sealer` for the same direction sealed."""

    def __init__(self, key: bytes, direction: Direction) -> None:
        self._cipher = _cipher(key, direction)

    def open(
        self,
        lane: int,
        number: int,
        beside: bytes | memoryview,
        sealed: memoryview,
        into: memoryview,
    ) -> memoryview:
        """Open a message into the beginning of ``into`` and return that part. Raises Unsealed; then
        the content of ``into`` comes from an unknown sender and must not be used."""
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
    """Takes the place of AES-GCM for messages in clear."""

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
    """Derive the cipher of one direction; raises LiveshiftError for bytes that are no key."""
    if len(key) not in (KEY, CLEAR_KEY):
        raise LiveshiftError(f"the key has {len(key)} bytes, expected {KEY}")
    info = (b"liveshift clear " if in_clear(key) else b"liveshift ") + direction.encode()
    derived = HKDF(SHA256(), KEY, salt=None, info=info).derive(key)
    return _Tagged(derived) if in_clear(key) else AESGCM(derived)
