# SPDX-License-Identifier: Apache-2.0
"""Operators' keys, revocation, and who a key is known to be from one moment to the next."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import zmq
from cluster_files import WITH_KEYS

from liveshift.errors import LiveshiftError, NotFound, Refused, WrongUsage
from liveshift.launcher.commands import keys_cmd
from liveshift.runtime.config.access import Role
from liveshift.runtime.control import keyring, keys
from liveshift.runtime.control.keyring import NOBODY, Holder, KnownKeys


def public(directory: Path, name: str) -> bytes:
    found = [e.key for e in keyring.read(directory) if e.holder.name == name and e.key]
    assert len(found) == 1
    return found[0]


def states(directory: Path) -> list[tuple[str, str, str]]:
    return [(e.holder.name, e.holder.kind, e.state) for e in keyring.read(directory)]


# ---- operators ----


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_an_operators_public_half_says_the_role(tmp_path: Path, umask: int) -> None:
    directory = tmp_path / "etc" / "keys"
    before = os.umask(umask)
    try:
        keys.init(directory, ["h0"])
        written = keys.add_operator(directory, "ops", Role.VIEW)
    finally:
        os.umask(before)
    names = [str(path.relative_to(directory)) for path in written]
    assert names == ["operators/ops.key", "public/operators/ops.view.pub"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600, 0o644]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert stat.S_IMODE((directory / "operators").stat().st_mode) == 0o700
    assert not (directory / "public" / "operators").stat().st_mode & 0o022
    assert keys.load_pair(written[0]).public == public(directory, "ops")
    assert ("ops", "operator", "valid") in states(directory)
    assert "ops" not in keys.public_keys(directory), "an operator is no machine"


def test_one_name_has_one_holder(key_directory: Path) -> None:
    with pytest.raises(Refused, match=r'ops is the name of an operator with the role "operate"'):
        keys.add_operator(key_directory, "ops", Role.ADMIN)
    with pytest.raises(Refused, match="h0 is the name of a host already"):
        keys.add_operator(key_directory, "h0", Role.VIEW)
    with pytest.raises(Refused, match="ops is the name of an operator"):
        keys.add_host(key_directory, "ops")
    with pytest.raises(WrongUsage, match="operator name: found"):
        keys.add_operator(key_directory, "a.admin", Role.VIEW)


def test_an_operator_needs_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no cluster's keys"):
        keys.add_operator(tmp_path / "keys", "ops", Role.VIEW)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("name", ["ops.root.pub", "ops.pub", "ops.user.pub", "a.b.view.pub"])
def test_a_file_name_that_gives_no_role_gives_none(key_directory: Path, name: str) -> None:
    place = key_directory / "public" / "operators"
    (place / "ops.operate.pub").rename(place / name)
    assert "valid" not in [state for who, _, state in states(key_directory) if who in ("ops", "a")]
    key = keys.load_pair(key_directory / "operators/ops.key").public
    assert key.decode() not in KnownKeys(key_directory, operators=True).holders()


@pytest.mark.parametrize("place", ["", "public", "public/operators", "public/revoked"])
def test_a_directory_that_others_could_write_counts_nothing(
    key_directory: Path, place: str
) -> None:
    keys.revoke(key_directory, "h1")
    (key_directory / place).chmod(0o777)
    with pytest.raises(Refused, match="its mode is 0777, expected 0755: other users could put in"):
        keyring.read(key_directory)
    known = KnownKeys(key_directory, operators=True)
    assert not known.callback("*", public_unchecked(key_directory, "h0"))


def public_unchecked(directory: Path, name: str) -> bytes:
    return (directory / "public" / f"{name}.pub").read_bytes().strip()


# ---- revoking ----


def test_a_revoked_key_is_recorded_and_its_secret_removed(key_directory: Path) -> None:
    was = public(key_directory, "h1")
    keys.revoke(key_directory, "h1")
    assert not (key_directory / "public" / "h1.pub").exists()
    assert not (key_directory / "hosts" / "h1.key").exists()
    assert [s for s in states(key_directory) if s[0] == "h1"] == [("h1", "host", "revoked")]
    assert public(key_directory, "h1") == was
    with pytest.raises(Refused, match="it was revoked already"):
        keys.revoke(key_directory, "h1")
    keys.add_host(key_directory, "h1")
    assert [s[2] for s in states(key_directory) if s[0] == "h1"] == ["valid", "revoked"]
    assert keys.public_keys(key_directory)["h1"] != was


def test_an_operators_record_keeps_the_role(key_directory: Path) -> None:
    keys.revoke(key_directory, "ops")
    (entry,) = [e for e in keyring.read(key_directory) if e.holder.name == "ops"]
    assert (entry.holder, entry.state) == (Holder("ops", Role.OPERATE), "revoked")
    assert not (key_directory / "operators" / "ops.key").exists()
    keys.add_operator(key_directory, "ops", Role.ADMIN)


def test_twice_within_a_second(key_directory: Path) -> None:
    for _ in range(3):
        keys.revoke(key_directory, "h1")
        keys.add_host(key_directory, "h1")
    assert [s for s in states(key_directory) if s[0] == "h1"] == [
        ("h1", "host", "valid"),
        *[("h1", "host", "revoked")] * 3,
    ]


def test_a_revoked_key_put_back_counts_as_little(key_directory: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(key_directory, kept)
    keys.revoke(key_directory, "h1")
    for name in ("public/h1.pub", "hosts/h1.key"):
        shutil.copy(kept / name, key_directory / name)
    assert "h1" not in keys.public_keys(key_directory)
    with pytest.raises(Refused, match=r"h1\.key: this key of h1 was revoked"):
        keys.load_private(key_directory, "h1")
    (key_directory / "public" / "h1.pub").unlink()
    with pytest.raises(Refused, match=r"h1\.key: this key of h1 was revoked"):
        keys.add_host(key_directory, "h1")
    assert not (key_directory / "public" / "h1.pub").exists()
    shutil.copy(kept / "public" / "h1.pub", key_directory / "public" / "h9.pub")
    assert "h9" not in keys.public_keys(key_directory), "not under another name either"


def test_an_interrupted_revocation_counts_and_is_finished(key_directory: Path) -> None:
    """After the record, before the public half is gone."""
    half = (key_directory / "public" / "h1.pub").read_bytes()
    keys.revoke(key_directory, "h1")
    (key_directory / "public" / "h1.pub").write_bytes(half)
    assert "h1" not in keys.public_keys(key_directory)
    keys.revoke(key_directory, "h1")
    assert not (key_directory / "public" / "h1.pub").exists()
    assert len(list((key_directory / "public" / "revoked").iterdir())) == 1


def test_who_cannot_be_revoked(key_directory: Path) -> None:
    with pytest.raises(Refused, match="the orchestrator's key cannot be revoked"):
        keys.revoke(key_directory, "orchestrator")
    with pytest.raises(NotFound, match='no host or operator named "h7" has a key') as caught:
        keys.revoke(key_directory, "h7")
    assert caught.value.hint == "there are: h0, h1, orchestrator, ops"


# ---- who is it, now ----


class Frame:
    """What a receiver asks a frame for."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def get(self, name: str) -> str:
        assert name == "User-Id"
        return self._key.decode()


def owner(known: KnownKeys, key: bytes) -> str:
    return known.owner(Frame(key))  # type: ignore[arg-type]


def test_a_new_key_and_a_revoked_one_are_seen_at_once(key_directory: Path) -> None:
    known = KnownKeys(key_directory)
    was = public(key_directory, "h1")
    assert known.callback("*", was)
    assert owner(known, was) == "h1"
    keys.revoke(key_directory, "h1")
    assert owner(known, was) == NOBODY
    assert not known.callback("*", was)
    keys.add_host(key_directory, "h2")
    assert owner(known, public(key_directory, "h2")) == "h2"
    assert known.callback("*", public(key_directory, "h2"))


def test_operators_open_only_doors_made_for_them(key_directory: Path) -> None:
    key = public(key_directory, "ops")
    door, other = KnownKeys(key_directory, operators=True), KnownKeys(key_directory)
    assert (door.callback("*", key), other.callback("*", key)) == (True, False)
    assert door.holder(Frame(key)) == Holder("ops", Role.OPERATE)  # type: ignore[arg-type]
    assert (owner(door, key), owner(other, key)) == (NOBODY, NOBODY)


def test_a_role_may_change_with_the_name_of_the_file(key_directory: Path) -> None:
    known = KnownKeys(key_directory, operators=True)
    key = public(key_directory, "ops")
    place = key_directory / "public" / "operators"
    assert known.holder(Frame(key)) == Holder("ops", Role.OPERATE)  # type: ignore[arg-type]
    (place / "ops.operate.pub").rename(place / "ops.view.pub")
    assert known.holder(Frame(key)) == Holder("ops", Role.VIEW)  # type: ignore[arg-type]


def test_a_file_written_over_in_place_is_seen(
    key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "LOOK_S", 0.0)
    known = KnownKeys(key_directory)
    was, new = public(key_directory, "h1"), zmq.curve_keypair()[0]
    assert owner(known, was) == "h1"
    (key_directory / "public" / "h1.pub").write_bytes(new)
    assert (owner(known, was), owner(known, new)) == (NOBODY, "h1")


def test_one_bad_file_keeps_nobody_else_out(
    key_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    h0, h1 = public(key_directory, "h0"), public(key_directory, "h1")
    (key_directory / "public" / "h1.pub").write_bytes(b"half a k")
    known = KnownKeys(key_directory)
    assert (known.callback("*", h0), known.callback("*", h1)) == (True, False)
    assert "h1 is not let in" in caplog.text
    (key_directory / "public" / "h2.pub").write_bytes(h0 + b"\n")
    assert owner(known, h0) == NOBODY, "whose it is can no longer be told"


def test_while_the_directory_cannot_be_trusted_nobody_new_comes_in_and_who_was_known_stays(
    key_directory: Path,
) -> None:
    known = KnownKeys(key_directory)
    h0 = public(key_directory, "h0")
    assert known.callback("*", h0)
    (key_directory / "public").chmod(0o777)
    assert not known.callback("*", h0)
    assert owner(known, h0) == "h0"
    (key_directory / "public").chmod(0o755)
    assert known.callback("*", h0)


def test_strangers_are_told_of_once(key_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = KnownKeys(key_directory)
    stranger = zmq.curve_keypair()[0]
    gone = public(key_directory, "h1")
    keys.revoke(key_directory, "h1")
    for _ in range(3):
        assert not known.callback("*", stranger)
        assert not known.callback("*", gone)
    assert caplog.text.count("turned away a peer with an unknown key") == 2
    assert "the revoked key of h1" in caplog.text


# ---- the commands ----


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(WITH_KEYS.format(keys=tmp_path / "keys"))
    return path


def test_commands_make_list_and_revoke(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFound, match="holds no keys"):
        keys_cmd.show(config, "table")
    keys_cmd.init(config)
    capsys.readouterr()
    keys_cmd.add_operator(config, "ops", "view")
    out, err = capsys.readouterr()
    assert [Path(line).name for line in out.split()] == ["ops.key", "ops.view.pub"]
    assert "--connect tcp://10.88.0.2:7400 --key ops.key" in err
    keys_cmd.revoke(config, "h1")
    out, err = capsys.readouterr()
    assert out == "h1 is revoked\n"
    assert "Copy" in err
    keys_cmd.show(config, "json")
    rows = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["kind"], r["role"], r["state"]) for r in rows] == [
        ("h0", "host", None, "valid"),
        ("orchestrator", "orchestrator", None, "valid"),
        ("ops", "operator", "view", "valid"),
        ("h1", "host", None, "revoked"),
    ]
    assert rows[3]["since"]
    keys_cmd.show(config, "table")
    assert capsys.readouterr().out.splitlines()[0].split() == [
        *("name", "kind", "role", "state", "since"),
    ]


def test_list_shows_what_cannot_be_used(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys_cmd.init(config)
    (config.parent / "keys" / "public" / "h1.pub").write_text("short\n")
    capsys.readouterr()
    keys_cmd.show(config, "table")
    out, err = capsys.readouterr()
    assert "unusable" in out
    assert "h1.pub: found 5 characters that are no key" in err


def test_errors_are_for_a_person(config: Path) -> None:
    keys_cmd.init(config)
    with pytest.raises(LiveshiftError) as caught:
        keys_cmd.revoke(config, "nobody")
    assert caught.value.hint
