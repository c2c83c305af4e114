# SPDX-License-Identifier: Apache-2.0
"""Signatures, by which a cluster knows what it has saved outside of its own memory.

The key is Ed25519 (RFC 8032), and follows from the orchestrator's secret (HKDF, RFC 5869). So only
the orchestrator can sign, and no further secret has to be kept. Another cluster's signature counts
if root has written the public half of its key here:

        <keys>/trusted/<name>.pub                   in Z85, as all other keys
"""

from __future__ import annotations

import re
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from ...errors import Refused, WrongUsage
from ..config.values import ORCHESTRATOR, HostName, Unfit, read_value
from . import keys
from .key_files import check_directory, make_directory, read_public, write_key

_KEY = re.compile(r"[0-9a-f]{64}")
_PURPOSE = b"liveshift: signatures of saved snapshots"
_RAW = serialization.Encoding.Raw, serialization.PublicFormat.Raw


class Signatures:
    """Signs and checks with the keys below ``directory``, where the orchestrator's secret is.

    Methods raise as keys.load_private does if that secret cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def key(self) -> str:
        """The public half of this cluster's key, in hex: people give it to other clusters, and a
        shell leaves it as it is."""
        return self._own().public_key().public_bytes(*_RAW).hex()

    def sign(self, data: bytes) -> bytes:
        return self._own().sign(data)

    def check(self, data: bytes, key: str, signature: bytes, what: str) -> str:
        """Return whose signature it is: "" for this cluster's, else the name under which the key is
        trusted. Raises Refused, for ``what``, if the key is not known or did not sign ``data``."""
        if not _KEY.fullmatch(key):  # the hint below is for a shell
            raise Refused(f"{what} has no signature that can be read")
        signers = {**self._trusted(), self.key: ""}
        if key not in signers:
            raise Refused(
                f"{what} is signed by another cluster, whose key is {key}",
                hint="a cluster whose key is trusted can run any code here, as any user: if it is"
                f" yours, `liveshift keys trust NAME {key}` on the orchestrator's machine",
            )
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, data)
        except (InvalidSignature, ValueError):  # ValueError: the key is no point of the curve
            raise Refused(f"{what} was changed since it was signed") from None
        return signers[key]

    def _own(self) -> Ed25519PrivateKey:
        secret = z85.decode(keys.load_private(self._directory, ORCHESTRATOR).secret)
        derived = HKDF(SHA256(), 32, salt=None, info=_PURPOSE).derive(secret)
        return Ed25519PrivateKey.from_private_bytes(derived)

    def _trusted(self) -> dict[str, str]:
        place = self._directory / "trusted"
        if not place.is_dir():
            return {}
        check_directory(place)
        return {
            z85.decode(read_public(path)).hex(): path.stem for path in sorted(place.glob("*.pub"))
        }


def trust(directory: Path, name: str, key: str) -> Path:
    """Let the signatures of another cluster count, and return the file written. Raises WrongUsage
    for a name or a key that cannot be one, Refused if that name has a key already."""
    try:
        read_value(HostName, name)
    except Unfit as unfit:
        raise WrongUsage(f"cluster name: {unfit}") from None
    if not _KEY.fullmatch(key):
        raise WrongUsage(
            f'"{key}" is no key of a cluster',
            hint="it has 64 digits, 0 to 9 and a to f; `liveshift keys signer` prints it there",
        )
    place = directory / "trusted"
    make_directory(place, 0o755)
    try:
        write_key(place / f"{name}.pub", z85.encode(bytes.fromhex(key)), 0o644)
    except FileExistsError:
        raise Refused(
            f"{place / name}.pub is there already", hint="remove it to trust another key"
        ) from None
    return place / f"{name}.pub"
