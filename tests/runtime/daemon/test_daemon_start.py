# SPDX-License-Identifier: Apache-2.0
"""A daemon that cannot start leaves nothing behind, and one that runs does not notice it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from daemon_process import Place, taken
from one_sandbox import netns

from liveshift.errors import LiveshiftError, NotPermitted
from liveshift.launcher.client.client import Client
from liveshift.runtime.agent import agent
from liveshift.runtime.agent.host import running_capsule
from liveshift.runtime.config.cluster import load
from liveshift.runtime.daemon.cluster_file import ClusterFile
from liveshift.runtime.messages import GetStatus, SetTaint, Status

__all__ = ["netns"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def status(place: Place) -> Status:
    with Client(place.run / "orchestrator.sock") as client:
        return client.get(Status, GetStatus(), 5)


def eventually_backed_up(place: Place, pid: int) -> None:
    """The journal's backup, of a moment after the start, is there."""
    until = time.monotonic() + 20
    while not Path(f"/proc/{pid}/root{place.state}/journal.backup").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_second_orchestrator_is_refused_and_the_first_one_does_not_notice(place: Place) -> None:
    with place.runs("orchestrator") as first:
        with Client(place.run / "orchestrator.sock") as client:
            client.request(SetTaint("h0", "so that there is a history"))
        eventually_backed_up(place, first.pid)
        made, socket = place.made(), (place.run / "orchestrator.sock").stat().st_ino
        said = place.fails("orchestrator", code=5)
        assert f"pid {first.pid}" in said
        assert str(place.state) in said
        assert place.made() == made
        assert (place.run / "orchestrator.sock").stat().st_ino == socket
        assert [host.taint for host in status(place).hosts] == ["so that there is a history"]


def test_its_port_is_bound_before_anything_is_touched(place: Place) -> None:
    """Another one with other directories, or another program, has the port."""
    address, _, port = place.orchestrator.rpartition(":")
    with taken(address, int(port)):
        said = place.fails("orchestrator", code=1)
    assert f"cannot listen on {place.orchestrator}" in said
    assert place.made() == []


def test_a_start_that_fails_at_the_socket_makes_no_journal(place: Place) -> None:
    place.run.write_text("no directory")
    assert str(place.run / "orchestrator.sock") in place.fails("orchestrator", code=1)
    assert place.made() == ["run"]


def test_the_socket_of_another_cluster_is_not_taken_away(place: Place, tmp_path: Path) -> None:
    """Its file has a state directory and a port of its own, and paths.run is the same."""
    (tmp_path / "other").mkdir()
    other = Place(tmp_path / "other")
    text = other.config.read_text().replace(f'"{other.run}"', f'"{place.run}"')
    other.config.write_text(text)
    path = place.run / "orchestrator.sock"
    with place.runs("orchestrator") as first:
        socket = path.stat().st_ino
        said = other.fails("orchestrator", code=5)
        assert f"pid {first.pid} listens on {path} already" in said
        assert "paths.run" in said
        assert path.stat().st_ino == socket
        assert status(place).cluster == "daemons"
    assert other.made() == []


def test_a_journal_that_cannot_be_read_keeps_the_orchestrator_down(place: Place) -> None:
    place.state.mkdir()
    journal = place.state / "journal.sqlite"
    journal.write_bytes(b"garbage, " * 1000)
    said = place.fails("orchestrator", code=1)
    assert f"error: the journal {journal}" in said
    assert "hint: " in said
    assert place.made() == ["run", "state", "state/journal.sqlite"], "no socket, no lock"


def test_one_that_was_killed_keeps_nobody_out(place: Place) -> None:
    with place.runs("orchestrator") as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait(10)
        assert (place.state / "orchestrator.lock").read_text() == f"{first.pid}\n"
    with place.runs("orchestrator"):
        assert status(place).cluster == "daemons"
    assert not (place.state / "orchestrator.lock").exists()
    with sqlite3.connect(place.state / "journal.sqlite") as journal:
        assert journal.execute("PRAGMA integrity_check").fetchone() == ("ok",)


ON_A_SMALL_DISK = 'mkdir -p "$0" && mount -t tmpfs -o size=600k none "$0" && exec "$@"'


@pytest.mark.root
def test_on_a_full_disk_what_fails_has_not_happened(place: Place) -> None:
    """The error names the disk and the path; with space again everything works again."""
    under = ("unshare", "--mount", "sh", "-c", ON_A_SMALL_DISK, str(place.state))
    with place.runs("orchestrator", under) as daemon:
        eventually_backed_up(place, daemon.pid)
        filler = Path(f"/proc/{daemon.pid}/root{place.state}/filler")
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 512)
        written = None
        with Client(place.run / "orchestrator.sock") as client:
            for number in range(2000):  # the file that is there has some room left
                reason = f"{number} " + "x" * 900
                try:
                    client.request(SetTaint("h0", reason))
                    written = reason
                except LiveshiftError as error:
                    said = error
                    break
            shown = client.get(Status, GetStatus())
            assert shown.hosts[0].taint == written, "not the one that failed"
            journal = place.state / "journal.sqlite"
            words = f"the journal {journal} cannot be written: the disk at {place.state} is full"
            assert str(said).startswith(words)
            assert shown.trouble == str(said)
            filler.unlink()
            client.request(SetTaint("h0", "there is space"))
            shown = client.get(Status, GetStatus())
            assert (shown.hosts[0].taint, shown.trouble) == ("there is space", "")


def test_an_agent_needs_root(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    cluster = load(place.config)
    with pytest.raises(NotPermitted, match="it must run as root"):
        asyncio.run(agent.serve(cluster, "h0", ClusterFile(place.config, cluster)))
    assert place.made() == []


MOUNTS = 'trap "grep -c $0 /proc/self/mounts >&2" EXIT; "$@"'
"""Run a command, then count the mounts below a directory on stderr."""


@pytest.mark.root
class TestAgent:
    def test_a_second_one_is_refused(self, place: Place) -> None:
        from liveshift.runtime.daemon import state_lock

        with state_lock.held(place.state, "agent"):
            said = place.fails("agent", "--host", "h0", code=5)
            assert f"another agent runs with the state directory {place.state}" in said
            assert f"pid {os.getpid()}" in said
            assert place.made() == ["state", "state/agent.lock"]

    @pytest.mark.parametrize("which", ["data", "pages"])
    def test_its_ports_are_bound_before_anything_is_touched(self, place: Place, which: str) -> None:
        under = ("unshare", "--mount", "sh", "-c", MOUNTS, str(place.run))
        with taken("127.0.0.1", getattr(place, which)):
            said = place.fails("agent", "--host", "h0", code=1, under=under)
        assert re.search(rf"cannot listen for \w+ on 127.0.0.1:{getattr(place, which)}", said)
        assert said.splitlines()[-1] == "0", "nothing is mounted there"
        assert place.made() == []

    @pytest.mark.parametrize("flaw", ["socket", "note"])
    def test_a_start_that_fails_later_leaves_no_mount(self, place: Place, flaw: str) -> None:
        """/run is no tmpfs here, so that what CRIU found out about the kernel would be mounted."""
        made = {
            "socket": place.run / "agent.sock" / "in the way",
            "note": place.state / "capsules" / "gpt-0" / running_capsule.NOTE,
        }[flaw]
        made.parent.mkdir(parents=True)
        made.write_text("garbage")
        before = place.made()
        script = f"mount -t ramfs none /run && {MOUNTS.replace('$0', '-e $0 -e criu.kdat')}"
        under = ("unshare", "--mount", "sh", "-c", script, str(place.run))
        said = place.fails("agent", "--host", "h0", code=1, under=under)
        assert said.splitlines()[-1] == "0", said
        left = set(place.made()) - set(before)
        assert left <= {"run", "run/images"}, left

    def test_its_hosts_fence_stands_while_it_runs(self, place: Place, netns: Path) -> None:
        """No job is there, and no orchestrator."""
        inside = ("ip", "netns", "exec", netns.name)
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)

        def rules() -> str:
            listed = [*inside, "nft", "list", "ruleset"]
            return subprocess.run(listed, check=True, capture_output=True, text=True).stdout

        with place.runs("agent", inside, "--host", "h0"):
            assert "udp dport 4789 meta skuid != 0 " in rules()
        assert rules() == ""
