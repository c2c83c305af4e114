# SPDX-License-Identifier: Apache-2.0
"""``liveshift host add|remove`` and ``install-units``: what they write and what they print."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from systemd_verify import complaints

from liveshift.errors import NotFound
from liveshift.launcher.commands.install_units import Daemon, install_units
from liveshift.runtime.config.cluster import Spare, load
from liveshift.runtime.control import keyring, keys

TEXT = """\
# The file's own words stay.
[cluster]
name = "c"
orchestrator = "127.0.0.1:7400"
overlay = "10.99.0.0/16"

[hosts.h0]
address = "127.0.0.2"   # the first

[hosts.h1]
address = "127.0.0.3"

[files]
shared = ["/home"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A cluster file with its keys, all below a directory of the test's own."""
    path = tmp_path / "cluster.toml"
    path.write_text(f'{TEXT}\n[paths]\nkeys = "{tmp_path}/keys"\nrun = "{tmp_path}/run"\n')
    path.chmod(0o640)
    keys.init(tmp_path / "keys", ["h0", "h1"])
    return path


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def cli(*words: str) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "liveshift.launcher", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def names(config: Path) -> list[str]:
    return [host.name for host in load(config).hosts]


def test_a_host_is_added_with_its_keys_and_the_file_keeps_its_words(config: Path) -> None:
    words = ["host", "add", "h2", "127.0.0.4", "--slots", "2", "--spare", "dedicated"]
    done = cli(*words, "-c", str(config))
    assert done.code == 0, done
    added = load(config).host("h2")
    assert (added.address, added.slots, added.spare) == ("127.0.0.4", 2, Spare.DEDICATED)
    assert names(config) == ["h0", "h1", "h2"]
    assert "# The file's own words stay." in config.read_text()
    assert '"127.0.0.2"   # the first' in config.read_text()
    assert stat.S_IMODE(config.stat().st_mode) == 0o640
    directory = config.parent / "keys"
    assert keys.load_private(directory, "h2").public == keys.public_keys(directory)["h2"]
    # Public keys reach the others before the file that names their owner.
    lines = done.out.splitlines()
    to_h0 = [line for line in lines if "root@127.0.0.2" in line]
    assert ["public" in to_h0[0], "cluster.toml" in to_h0[1]] == [True, True]
    own = [line for line in lines if "root@127.0.0.4" in line]
    assert f"{directory}/hosts/h2.key" in " ".join(own)
    assert not any("hosts/h2.key" in line for line in to_h0)
    assert f"install-units agent --host h2 --config {config} --start" in own[-1]


def test_a_cluster_begins_with_its_first_host(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    head = TEXT.partition("[hosts.h0]")[0]
    path.write_text(f'{head}[paths]\nkeys = "{tmp_path}/keys"\n')
    done = cli("host", "add", "h0", "127.0.0.2", "-c", str(path))
    assert done.code == 0, done
    assert names(path) == ["h0"]
    assert sorted(keys.public_keys(tmp_path / "keys")) == ["h0", "orchestrator"]
    assert "to the other hosts" not in done.out
    done = cli("host", "add", "h1", "127.0.0.3", "-c", str(path))
    assert (done.code, names(path)) == (0, ["h0", "h1"]), done


def test_a_file_that_is_wrong_otherwise_gets_no_host(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    path.write_text('[cluster]\nname = "c"\n')
    done = cli("host", "add", "h0", "127.0.0.2", "-c", str(path))
    assert (done.code, path.read_text()) == (3, '[cluster]\nname = "c"\n')
    assert "cluster.orchestrator: found nothing" in done.err
    assert cli("host", "add", "h0", "127.0.0.2", "-c", str(tmp_path / "none")).code == 3


def test_a_name_may_be_as_long_as_dns_allows(config: Path) -> None:
    name = "rack-17-node-042-" + "x" * 46
    assert len(name) == 63
    assert cli("host", "add", name, "127.0.0.4", "-c", str(config)).code == 0
    assert name in keys.public_keys(config.parent / "keys")
    assert names(config)[-1] == name


def test_json_holds_files_and_commands(config: Path) -> None:
    done = cli("host", "add", "h2", "127.0.0.4", "-c", str(config), "-o", "json")
    said = json.loads(done.out)
    assert said["done"] == "added"
    assert any(command.startswith("scp") for command in said["commands"])
    assert [Path(file).name for file in said["files"]] == ["h2.key", "h2.pub"]


@pytest.mark.parametrize(
    ("words", "why", "code"),
    [
        (["h1", "127.0.0.4"], 'has a host "h1" already, with the address 127.0.0.3', 5),
        (["h2", "127.0.0.3"], "is the address of h1 already", 5),
        (["h2", "nonsense"], 'host h2: found "nonsense", expected', 2),
        (["H_2", "127.0.0.4"], "DNS label", 2),
    ],
)
def test_a_wrong_host_changes_nothing(config: Path, words: list[str], why: str, code: int) -> None:
    before = config.read_text()
    done = cli("host", "add", *words, "-c", str(config))
    assert (done.code, why in " ".join(done.err.split())) == (code, True), done
    assert config.read_text() == before
    assert sorted(keys.public_keys(config.parent / "keys")) == ["h0", "h1", "orchestrator"]


def test_elsewhere_than_where_the_keys_are_made_it_is_refused(config: Path) -> None:
    (config.parent / "keys/orchestrator.key").unlink()
    before = config.read_text()
    done = cli("host", "add", "h2", "127.0.0.4", "-c", str(config))
    assert done.code == 4
    assert "run this on the orchestrator's machine" in done.err
    assert config.read_text() == before


def test_a_host_is_removed_and_its_key_revoked(config: Path) -> None:
    done = cli("host", "remove", "h1", "-c", str(config))
    assert done.code == 0, done
    assert names(config) == ["h0"]
    assert "h1" not in config.read_text()
    assert "# The file's own words stay." in config.read_text()
    directory = config.parent / "keys"
    assert sorted(keys.public_keys(directory)) == ["h0", "orchestrator"]
    assert [e.holder.name for e in keyring.revoked(directory)] == ["h1"]
    assert "is not known" in done.err  # no orchestrator runs here that could say
    assert "systemctl disable --now liveshift-agent" in done.out
    assert "127.0.0.3" not in done.out.split("# to the other hosts")[1]
    # It may come back, with new keys.
    assert cli("host", "add", "h1", "127.0.0.3", "-c", str(config)).code == 0
    assert names(config) == ["h0", "h1"]


def test_an_unknown_or_the_last_host_is_not_removed(config: Path) -> None:
    assert cli("host", "remove", "h9", "-c", str(config)).code == 4
    assert cli("host", "remove", "h1", "-c", str(config)).code == 0
    done = cli("host", "remove", "h0", "-c", str(config))
    assert (done.code, names(config)) == (5, ["h0"])


class TestUnits:
    def test_they_name_this_interpreter_and_this_file(self, config: Path, tmp_path: Path) -> None:
        units = tmp_path / "units"
        units.mkdir()
        words = ["install-units", "agent", "orchestrator", "--host", "h1", "-c", str(config)]
        done = cli(*words, "--directory", str(units))
        assert done.code == 0, done
        agent = (units / "liveshift-agent.service").read_text()
        program = f"{sys.executable} -m liveshift.launcher.cli"
        assert f"ExecStart={program} agent --config {config} --host h1\n" in agent
        orchestrator = (units / "liveshift-orchestrator.service").read_text()
        assert f"ExecStart={program} orchestrator --config {config}\n" in orchestrator
        assert "/usr/bin/env" not in agent + orchestrator
        assert sorted(done.out.split()) == sorted(str(units / n) for n in os.listdir(units))
        assert "systemctl daemon-reload && systemctl enable --now" in done.err

    @pytest.mark.needs("systemd-analyze")
    def test_systemd_accepts_them(self, config: Path, tmp_path: Path) -> None:
        units = tmp_path / "units"
        units.mkdir()
        words = ("install-units", "agent", "--host", "h1", "-c", str(config))
        done = cli(*words, "--directory", str(units))
        assert done.code == 0, done
        assert complaints([units / "liveshift-agent.service"], tmp_path) == []

    def test_a_host_of_no_cluster_is_refused(self, config: Path, tmp_path: Path) -> None:
        done = cli(
            "install-units",
            "agent",
            "--host",
            "h9",
            "-c",
            str(config),
            "--directory",
            str(tmp_path),
        )
        assert (done.code, list(tmp_path.glob("*.service"))) == (4, [])

    def test_without_a_host_it_is_the_one_named_as_this_machine(
        self, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def install() -> None:
            install_units([Daemon.AGENT], config, directory=tmp_path)

        monkeypatch.setattr("socket.gethostname", lambda: "gpu7.example.org")
        with pytest.raises(NotFound, match='no host "gpu7" in cluster') as refused:
            install()
        assert refused.value.hint == 'name it: --host NAME; this machine is "gpu7"'
        assert list(tmp_path.glob("*.service")) == []
        monkeypatch.setattr("socket.gethostname", lambda: "h1.example.org")
        install()
        assert "--host %l" in (tmp_path / "liveshift-agent.service").read_text()

    def test_a_place_that_cannot_be_written_is_told(self, config: Path) -> None:
        words = ("install-units", "agent", "--host", "h1", "-c", str(config))
        done = cli(*words, "--directory", "/nonexistent")
        assert done.code == 1
        assert "cannot write /nonexistent/liveshift-agent.service" in done.err
