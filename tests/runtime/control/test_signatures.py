# SPDX-License-Identifier: Apache-2.0
"""What a cluster has signed is known again, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.errors import LiveshiftError, NotFound, NotPermitted, Refused, WrongUsage
from liveshift.runtime.control import keys
from liveshift.runtime.control.signatures import Signatures, trust

DATA = b"what was saved"


def a_cluster(directory: Path) -> Signatures:
    keys.init(directory, ["h0"])
    return Signatures(directory)


@pytest.fixture
def own(tmp_path: Path) -> Signatures:
    return a_cluster(tmp_path / "own")


@pytest.fixture
def other(tmp_path: Path) -> Signatures:
    return a_cluster(tmp_path / "other")


def test_a_clusters_own_signature_counts_also_after_a_restart(
    own: Signatures, tmp_path: Path
) -> None:
    signature = own.sign(DATA)
    again = Signatures(tmp_path / "own")
    assert again.key == own.key
    assert len(own.key) == 64
    assert again.check(DATA, own.key, signature, "it") == ""


def test_the_key_is_neither_the_secret_nor_the_public_key(own: Signatures, tmp_path: Path) -> None:
    """Who may see it must be able to do no more than check."""
    from zmq.utils import z85

    pair = keys.load_private(tmp_path / "own", "orchestrator")
    assert own.key not in {z85.decode(pair.secret).hex(), z85.decode(pair.public).hex()}


def test_data_or_signature_that_were_changed_are_refused(own: Signatures) -> None:
    signature = own.sign(DATA)
    changed = bytes([signature[0] ^ 1]) + signature[1:]
    for data, signed in ((DATA + b" ", signature), (DATA, changed), (DATA, b""), (b"", signature)):
        with pytest.raises(Refused, match=r"^it was changed since it was signed"):
            own.check(data, own.key, signed, "it")


def test_another_clusters_signature_counts_once_it_is_trusted(
    own: Signatures, other: Signatures, tmp_path: Path
) -> None:
    signature = other.sign(DATA)
    with pytest.raises(Refused, match=f"it is signed by another cluster, .* {other.key}") as no:
        own.check(DATA, other.key, signature, "it")
    assert f"`liveshift keys trust NAME {other.key}`" in (no.value.hint or "")
    written = trust(tmp_path / "own", "west", other.key)
    assert own.check(DATA, other.key, signature, "it") == "west"
    with pytest.raises(Refused, match="was changed"):
        own.check(DATA + b"x", other.key, signature, "it")
    with pytest.raises(Refused, match="was changed"):
        own.check(DATA, other.key, own.sign(DATA), "it")
    assert own.check(DATA, own.key, own.sign(DATA), "it") == ""
    written.unlink()
    with pytest.raises(Refused, match="signed by another cluster"):
        own.check(DATA, other.key, signature, "it")


def test_a_cluster_that_trusts_itself_knows_its_own_all_the_same(
    own: Signatures, tmp_path: Path
) -> None:
    trust(tmp_path / "own", "us", own.key)
    assert own.check(DATA, own.key, own.sign(DATA), "it") == ""


@pytest.mark.parametrize(
    "key",
    ["", "abc", "A" * 64, "0" * 63, "0" * 65, "g" * 64, "0" * 64 + "\n", "x; reboot", "\x1b[2J"],
)
def test_what_is_no_key_is_neither_trusted_nor_printed(
    own: Signatures, tmp_path: Path, key: str
) -> None:
    """The key in a directory comes from anybody; the hint is a command for root's shell."""
    with pytest.raises(Refused) as refused:
        own.check(DATA, key, own.sign(DATA), "it")
    assert refused.value.message == "it has no signature that can be read"
    assert not refused.value.hint
    with pytest.raises(WrongUsage, match="is no key of a cluster"):
        trust(tmp_path / "own", "west", key)
    assert not (tmp_path / "own" / "trusted").exists()


@pytest.mark.parametrize("name", ["", "../west", "a/b", ".", "a b", "x" * 300])
def test_a_cluster_needs_a_name_that_can_be_one(
    own: Signatures, other: Signatures, tmp_path: Path, name: str
) -> None:
    with pytest.raises(WrongUsage, match="cluster name: "):
        trust(tmp_path / "own", name, other.key)
    assert not (tmp_path / "own" / "trusted").exists()


def test_a_name_keeps_its_key(own: Signatures, other: Signatures, tmp_path: Path) -> None:
    written = trust(tmp_path / "own", "west", other.key)
    assert written == tmp_path / "own" / "trusted" / "west.pub"
    assert written.stat().st_mode & 0o777 == 0o644
    with pytest.raises(Refused, match=r"west\.pub is there already") as refused:
        trust(tmp_path / "own", "west", own.key)
    assert "remove it" in (refused.value.hint or "")
    assert own.check(DATA, other.key, other.sign(DATA), "it") == "west"


def test_a_key_that_others_could_have_written_is_not_used(
    own: Signatures, other: Signatures, tmp_path: Path
) -> None:
    written = trust(tmp_path / "own", "west", other.key)
    signature = other.sign(DATA)
    written.chmod(0o666)
    with pytest.raises(Refused, match="other users could"):
        own.check(DATA, other.key, signature, "it")
    written.chmod(0o644)
    written.parent.chmod(0o777)
    with pytest.raises(Refused, match="other users could"):
        own.check(DATA, other.key, signature, "it")
    written.parent.chmod(0o755)
    assert own.check(DATA, other.key, signature, "it") == "west"


def test_a_secret_that_others_can_read_signs_nothing(own: Signatures, tmp_path: Path) -> None:
    (tmp_path / "own" / "orchestrator.key").chmod(0o644)
    for use in (lambda: own.sign(DATA), lambda: own.key):
        with pytest.raises(Refused, match="its mode is 0644"):
            use()


def test_without_keys_nothing_is_signed(tmp_path: Path) -> None:
    with pytest.raises((NotFound, NotPermitted)) as missing:
        Signatures(tmp_path / "none").sign(DATA)
    assert isinstance(missing.value, LiveshiftError)
    assert "liveshift keys init" in (missing.value.hint or "")
