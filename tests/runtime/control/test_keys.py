# SPDX-License-Identifier: Apache-2.0
"""CURVE keys as files: made once, read only when nobody else could have touched them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
from cluster_files import WITH_KEYS

from liveshift.errors import ConfigError, NotFound, NotPermitted, Refused, WrongUsage
from liveshift.launcher.commands import keys_cmd
from liveshift.runtime.control import keys


@pytest.fixture
def made(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    keys.init(directory, ["h0", "h1"])
    return directory


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_init_makes_pairs_with_the_right_modes(tmp_path: Path, umask: int) -> None:
    directory = tmp_path / "etc" / "keys"
    before = os.umask(umask)
    try:
        written = keys.init(directory, ["h0", "h1"])
    finally:
        os.umask(before)
    assert (
        sorted(str(p.relative_to(directory)) for p in written)
        == sorted(files(directory))
        == [
            "hosts/h0.key",
            "hosts/h1.key",
            "orchestrator.key",
            "public/h0.pub",
            "public/h1.pub",
            "public/orchestrator.pub",
        ]
    )
    for path in written:
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.suffix == ".key" else 0o644)
    assert stat.S_IMODE((directory / "hosts").stat().st_mode) == 0o700
    assert not (directory / "public").stat().st_mode & 0o022
    assert keys.public_keys(directory).keys() == {"h0", "h1", "orchestrator"}


def test_pairs_belong_together_and_differ(made: Path) -> None:
    public = keys.public_keys(made)
    pairs = {name: keys.load_private(made, name) for name in public}
    assert {name: pair.public for name, pair in pairs.items()} == public
    assert all(zmq.curve_public(pair.secret) == pair.public for pair in pairs.values())
    assert len({pair.secret for pair in pairs.values()}) == 3
    assert pairs["h0"].secret.decode() not in repr(pairs["h0"])


def test_sockets_take_the_keys(made: Path) -> None:
    server, client = keys.load_private(made, "orchestrator"), keys.load_private(made, "h0")
    with zmq.Context() as context, context.socket(zmq.REP) as rep, context.socket(zmq.REQ) as req:
        for socket, pair in ((rep, server), (req, client)):
            socket.linger = 0
            socket.rcvtimeo = 2000
            socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        rep.curve_server = True
        req.curve_serverkey = keys.public_keys(made)["orchestrator"]
        req.connect(f"tcp://127.0.0.1:{rep.bind_to_random_port('tcp://127.0.0.1')}")
        req.send(b"hello")
        assert rep.recv() == b"hello"


def test_init_twice_is_refused_and_changes_nothing(made: Path) -> None:
    before = files(made)
    with pytest.raises(Refused, match=r"orchestrator\.key: the cluster has its keys already"):
        keys.init(made, ["h0", "h9"])
    assert files(made) == before


def test_interrupted_init_is_finished(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made / "orchestrator.key").unlink()
    (made / "public" / "orchestrator.pub").unlink()
    (made / "public" / "h1.pub").unlink()
    before = files(made)
    written = keys.init(made, ["h0", "h1"])
    assert sorted(p.name for p in written) == ["h1.pub", "orchestrator.key", "orchestrator.pub"]
    assert files(made).items() >= before.items()
    assert keys.load_private(made, "h1").public == keys.public_keys(made)["h1"]


def test_failed_write_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        keys.init(tmp_path / "keys", ["h0"])
    assert files(tmp_path / "keys") == {}


def test_add_host(made: Path) -> None:
    before = files(made)
    assert [p.name for p in keys.add_host(made, "h2")] == ["h2.key", "h2.pub"]
    assert files(made).items() > before.items()
    with pytest.raises(Refused, match=r'h2\.key: host "h2" has its keys already'):
        keys.add_host(made, "h2")


@pytest.mark.parametrize("name", ["../x", "orchestrator", "H0", "", "a" * 64, "-x"])
def test_names_that_are_no_hosts(made: Path, name: str) -> None:
    with pytest.raises(WrongUsage, match=r"host name: found .*, expected a DNS label"):
        keys.add_host(made, name)


def test_public_key_without_its_secret_is_not_replaced(made: Path) -> None:
    (made / "hosts" / "h0.key").unlink()
    with pytest.raises(Refused, match=r"h0\.pub is there without its secret"):
        keys.add_host(made, "h0")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o700])
def test_secret_open_to_others_is_refused(made: Path, mode: int) -> None:
    path = made / "hosts" / "h0.key"
    path.chmod(mode)
    with pytest.raises(Refused, match=f"h0.key: its mode is {mode:04o}, expected 0600") as caught:
        keys.load_private(made, "h0")
    assert caught.value.hint == f"chmod 600 {path}"
    path.chmod(0o400)
    assert keys.load_private(made, "h0")


def test_public_keys_that_others_could_write_are_refused(made: Path) -> None:
    (made / "public").chmod(0o777)
    with pytest.raises(Refused, match="public: its mode is 0777, expected 0755: other users could"):
        keys.public_keys(made)
    (made / "public").chmod(0o755)
    (made / "public" / "h1.pub").chmod(0o666)
    with pytest.raises(Refused, match=r"h1\.pub: its mode is 0666, expected 0644"):
        keys.public_keys(made)


@pytest.mark.root
def test_secret_of_another_user_is_refused(made: Path) -> None:
    os.chown(made / "orchestrator.key", 65534, 65534)
    with pytest.raises(Refused, match=r"orchestrator\.key: belongs to user 65534, expected user 0"):
        keys.load_private(made, "orchestrator")


@pytest.mark.root
def test_secret_that_may_not_be_read(made: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(NotPermitted, match="cannot read the key as user 65534: Permission den"):
            keys.load_private(made, "h0")
    finally:
        os.seteuid(0)


def test_what_is_no_plain_file_is_refused(made: Path) -> None:
    path = made / "hosts" / "h0.key"
    path.rename(made / "elsewhere")
    path.symlink_to(made / "elsewhere")
    with pytest.raises(Refused, match="found a symbolic link, expected a plain file"):
        keys.load_private(made, "h0")
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(Refused, match="found no plain file, expected a key"):
        keys.load_private(made, "h0")


@pytest.mark.parametrize("text", [b"", b"x" * 39, b"~" * 40, b"#" * 40, b"\xff" * 40, b"a" * 5000])
def test_what_is_no_key_is_named(made: Path, text: bytes) -> None:
    (made / "public" / "h0.pub").write_bytes(text)
    with pytest.raises(ConfigError, match=r"h0\.pub: found .* expected 40 characters of Z85"):
        keys.public_keys(made)


def test_halves_of_different_pairs(made: Path) -> None:
    (made / "public" / "h0.pub").write_bytes((made / "public" / "h1.pub").read_bytes())
    with pytest.raises(ConfigError, match=r"h0\.key does not belong to .*h0\.pub"):
        keys.load_private(made, "h0")
    with pytest.raises(ConfigError, match=r"h1\.pub holds the key of .*h0\.pub"):
        keys.public_keys(made)


def test_missing_keys(tmp_path: Path, made: Path) -> None:
    with pytest.raises(NotFound, match=r"h9\.key: no such key"):
        keys.load_private(made, "h9")
    with pytest.raises(NotFound, match="no public keys"):
        keys.public_keys(tmp_path / "nowhere")


def test_commands_write_files_and_say_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, config = tmp_path / "keys", tmp_path / "cluster.toml"
    config.write_text(WITH_KEYS.format(keys=directory))
    keys_cmd.init(config)
    out, err = capsys.readouterr()
    assert sorted(out.split()) == sorted(str(directory / name) for name in files(directory))
    assert "Copy" in err
    with pytest.raises(NotFound, match='no host "h7"'):
        keys_cmd.add_host(config, "h7")
    with pytest.raises(Refused, match="has its keys already"):
        keys_cmd.add_host(config, "h1")
