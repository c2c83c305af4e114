# SPDX-License-Identifier: Apache-2.0
"""The doctor with a cluster file: this machine's keys, ports of the others, files and paths."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import double

from liveshift.launcher.checks import cluster as checks
from liveshift.launcher.checks.doctor import examine
from liveshift.launcher.checks.finding import Finding, Verdict
from liveshift.runtime.config.cluster import Cluster, parse
from liveshift.runtime.control import keys

__all__ = ["double"]

FILE = """
[cluster]
name = "prod"
orchestrator = "127.0.0.1:{orchestrator}"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "127.0.0.1"
[hosts.h1]
address = "127.0.0.2"
data_port = {data}
pages_port = {pages}
[files]
shared = [{shared}]
[paths]
keys = "{folder}/keys"
run = "{folder}"
"""

Make = Callable[..., Cluster]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """A cluster of this machine, h0, and h1, which is the loopback's second address."""

    def make(orchestrator: int = 1, data: int = 2, pages: int = 3, shared: str = "") -> Cluster:
        text = FILE.format(
            orchestrator=orchestrator, data=data, pages=pages, shared=shared, folder=tmp_path
        )
        return parse(text).cluster

    return make


@contextlib.contextmanager
def listening(address: str) -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen()
        yield listener.getsockname()[1]


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_ports_that_answer_and_that_do_not(made: Make) -> None:
    with (
        listening("127.0.0.1") as one,
        listening("127.0.0.2") as two,
        listening("127.0.0.2") as three,
    ):
        finding = only(checks.ports(made(one, two, three)))
        assert (finding.verdict, finding.found) == (Verdict.OK, "3 connections to 2 machines")
        cluster = made(one, two, three)
    with listening("127.0.0.2") as two:
        finding = only(checks.ports(made(int(str(cluster.orchestrator).split(":")[1]), two, three)))
    assert finding.verdict is Verdict.WARN
    assert finding.found == (
        f"the orchestrator at {cluster.orchestrator}: connection refused;"
        f" h1 at 127.0.0.2:{three}: connection refused"
    )
    assert finding.advice == "start the daemon where a connection is refused"


def test_a_port_that_a_firewall_drops(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError if address[1] == 3 else ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", silent)
    finding = only(checks.ports(made()))
    assert finding.found.endswith("h1 at 127.0.0.2:3: no answer")
    assert "open the port in the firewall (UDP 4789 too)" in finding.advice


def test_keys(made: Make, tmp_path: Path) -> None:
    cluster = made()
    finding = only(checks.own_keys(cluster))
    assert finding.verdict is Verdict.FAIL, "there are none"
    keys.init(tmp_path / "keys", ["h0", "h1"])
    finding = only(checks.own_keys(cluster))
    assert (finding.verdict, finding.found) == (
        Verdict.OK,
        "of h0 and orchestrator, and public ones",
    )
    keys.public_path(tmp_path / "keys", "h1").unlink()
    finding = only(checks.own_keys(cluster))
    assert finding.verdict is Verdict.WARN
    assert "no public key of h1" in finding.found
    keys.secret_path(tmp_path / "keys", "h0").chmod(0o644)
    finding = only(checks.own_keys(cluster))
    assert finding.verdict is Verdict.FAIL
    assert "0644" in finding.found or "mode" in finding.found
    shutil.rmtree(tmp_path / "keys")


def test_files_that_differ(made: Make, double: Any) -> None:
    cluster = made()
    finding = only(checks.equal_files(cluster))
    assert (finding.verdict, finding.found) == (Verdict.OK, "equal on 3 hosts")
    double.hosts["h2"].other_file = True
    finding = only(checks.equal_files(cluster))
    assert (finding.verdict, finding.found) == (Verdict.WARN, "h2 uses another file")
    double.path.unlink()
    assert "no daemon runs here" in only(checks.equal_files(cluster)).found


def test_shared_paths(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(checks.shared_paths(made())) == []
    cluster = made(shared=f'"{tmp_path}", "/nowhere/at/all"')
    finding = only(checks.shared_paths(cluster))
    assert (finding.verdict, finding.found) == (Verdict.FAIL, "this machine lacks /nowhere/at/all")
    monkeypatch.setattr(checks, "_file_system", lambda path, mounts: "ext4")
    finding = only(checks.shared_paths(made(shared=f'"{tmp_path}"')))
    assert (finding.verdict, finding.found) == (Verdict.WARN, f"{tmp_path} is on ext4")
    monkeypatch.setattr(checks, "_file_system", lambda path, mounts: "nfs4")
    finding = only(checks.shared_paths(made(shared=f'"{tmp_path}"')))
    assert (finding.verdict, finding.found) == (Verdict.OK, f"{tmp_path} (nfs4)")


def test_the_doctor_looks_at_all_of_it(tmp_path: Path) -> None:
    shared = f'"{tmp_path}"'
    text = FILE.format(orchestrator=1, data=2, pages=3, shared=shared, folder=tmp_path)
    rows = [finding.check for finding in examine(None, parse(text))]
    assert {"keys", "ports", "cluster files", "shared paths"} <= set(rows)


def test_without_a_file_nothing_of_it_is_looked_at() -> None:
    for check in (checks.own_keys, checks.ports, checks.equal_files, checks.shared_paths):
        assert list(check(None)) == []
