# SPDX-License-Identifier: Apache-2.0
"""Hosts and their labs come and go: power lost, killed on the way up, nothing left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from bare_labs import lab_root, name, output, reaches, without_daemons
from waits import until

from liveshift.errors import LiveshiftError, NotFound, Refused
from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab
from liveshift.launcher.lab.tasks import Task

__all__ = ["lab_root", "name"]

pytestmark = pytest.mark.lab


class TestPower:
    def test_a_killed_host_is_silent_and_comes_back_with_its_disk(self, name: str) -> None:
        lab = without_daemons(name)
        output(lab, "h1", "sh", "-c", "echo kept >/var/tmp/x; echo lost >/dev/shm/x")
        output(lab, "h1", "sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &")
        labs.separate(lab, "h1", "h2")
        mac = output(lab, "h1", "cat", "/sys/class/net/eth0/address")
        labs.kill_host(lab, "h1")
        assert not lab.hosts["h1"].running
        assert lab.cuts == []
        assert not reaches(lab, "h0", "h1", seconds=0.5)
        assert reaches(lab, "h0", "h2")
        with pytest.raises(Refused, match="h1 does not run"):
            labs.run_in(lab, "h1", ["true"])
        labs.boot_host(lab, "h1")
        assert reaches(lab, "h0", "h1")
        assert reaches(lab, "h1", "h2")
        assert output(lab, "h1", "cat", "/sys/class/net/eth0/address") == mac
        assert output(lab, "h1", "cat", "/var/tmp/x") == "kept\n"
        assert output(lab, "h1", "ls", "/dev/shm") == ""
        assert "sleep" not in output(lab, "h1", "ps", "-A", "-o", "comm")


class TestDown:
    def test_everything_in_a_host_goes_and_nothing_else(self, name: str) -> None:
        bystander = subprocess.Popen(["sleep", "600"])
        lab = without_daemons(name)
        netns = lab.hosts["h0"].netns
        visitor = subprocess.Popen(["ip", "netns", "exec", netns, "sleep", "600"])
        # A sandbox in the sandbox, as a capsule is: all namespaces of its own, its network named.
        output(lab, "h0", "ip", "netns", "add", "inner")
        inside = "exec ip netns exec inner unshare --pid --mount --fork sleep 601"
        output(lab, "h0", "sh", "-c", f"setsid sh -c '{inside}' >/dev/null 2>&1 &")
        mounted = lab.directory / "h0" / "mounted"
        mounted.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounted], check=True)
        try:
            until(lambda: any(line.endswith(": sleep 601") for line in labs.leftovers(name)))
            left = labs.leftovers(name)
            assert f"network namespace {netns}" in left
            assert f"process {visitor.pid}: sleep 600" in left
            assert f"mount {mounted}" in left
            assert f"directory {lab.directory}" in left
            labs.down(name)
            assert labs.leftovers(name) == []
            assert visitor.wait(5) == -signal.SIGKILL
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()
        labs.down(name)

    def test_a_lab_without_its_directory_is_removed_all_the_same(self, name: str) -> None:
        lab = without_daemons(name)
        (lab.directory / "lab.json").unlink()
        with pytest.raises(NotFound, match="is not whole"):
            labs.find(name)
        lab.directory.rename(lab.directory.with_name("elsewhere"))
        assert labs.leftovers(name) != []
        lab.directory.with_name("elsewhere").rename(lab.directory)
        labs.down(name)
        assert labs.leftovers(name) == []

    # A command that is SIGKILLed just when it has started its n-th child, which goes on.
    KILLED = """
import os, signal, subprocess, sys
left = int(sys.argv[2])
real = subprocess.Popen.__init__
def counting(self, *args, **kwargs):
    global left
    real(self, *args, **kwargs)
    left -= 1
    if left == 0: os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen.__init__ = counting
from liveshift.launcher.lab import up
up(sys.argv[1], 3)
"""

    # 1, 2: the switch; then six for each of four hosts: 3 wire it, sandbox, what is in it, daemon
    MORE = tuple(pytest.param(child, marks=pytest.mark.long) for child in (3, 7, 12, 26))

    @pytest.mark.parametrize("child", [1, 6, 8, 18, *MORE])
    def test_after_a_killed_up(self, name: str, child: int) -> None:
        up = subprocess.run(
            [sys.executable, "-c", self.KILLED, name, str(child)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert up.returncode == -signal.SIGKILL, up.stderr
        assert name in labs.names()
        assert labs.find(name).state == "making"
        labs.down(name)
        assert labs.leftovers(name) == []
        assert name not in labs.names()

    def test_a_command_still_under_way_is_ended_first(self, name: str) -> None:
        lab = without_daemons(name, 1)
        code = ["-c", "import time; time.sleep(600)"]
        slow = subprocess.Popen(["ip", *code, lab.hosts["h0"].netns], executable=sys.executable)
        other = subprocess.Popen(["ip", *code, "ls-other-h0"], executable=sys.executable)
        try:
            labs.down(name)
            assert slow.wait(5) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()

    def test_up_replaces_what_a_killed_one_left(self, name: str) -> None:
        subprocess.run([sys.executable, "-c", self.KILLED, name, "20"], timeout=60)
        old = labs.find(name)
        inits = [machine.init for machine in old.machines if machine.init]
        assert len(inits) == 3
        assert all(init.alive for init in inits)
        lab = without_daemons(name)
        assert not any(init.alive for init in inits)
        assert reaches(lab, "h0", "h2")

    def test_an_up_that_fails_leaves_nothing(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(lab: Lab, machine: labs.LabHost) -> None:
            if machine.name == "h1":
                raise KeyboardInterrupt

        monkeypatch.setattr("liveshift.launcher.lab.making.daemons.start", fail)
        with pytest.raises(KeyboardInterrupt):
            labs.up(name, 3)
        assert labs.leftovers(name) == []

    def test_a_daemon_that_cannot_start_is_named_with_its_last_words(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def command(lab: Lab, machine: labs.LabHost) -> list[str]:
            last = "echo no luck today >&2; exit 3" if machine.name == "h1" else "sleep 600"
            return ["sh", "-c", last]

        monkeypatch.setattr("liveshift.launcher.lab.daemons._command", command)
        with pytest.raises(LiveshiftError, match=r"agent on h1 has ended(?s:.*)no luck today"):
            labs.up(name, 2)
        assert labs.leftovers(name) == []

    def test_a_lab_being_made_is_not_removed_by_another(self, name: str) -> None:
        code = (
            "import sys, time\nfrom liveshift.launcher.lab import making\n"
            "with making.fresh(sys.argv[1], 2): print('made', flush=True); time.sleep(600)"
        )
        maker = subprocess.Popen(
            [sys.executable, "-c", code, name], stdout=subprocess.PIPE, text=True
        )
        with maker:
            assert maker.stdout is not None
            assert maker.stdout.readline() == "made\n"
            try:
                with pytest.raises(Refused, match="another command is at work"):
                    labs.down(name)
            finally:
                maker.kill()


class TestDaemons:
    def test_its_daemons_can_be_stopped_and_started(self, name: str) -> None:
        lab = labs.up(name, 3)
        assert lab.state == "up"
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(lab.socket))
        for host in ("h1", "ctl"):
            before = lab.machine(host).daemon
            assert isinstance(before, Task)
            words = Path(f"/proc/{before.pid}/cmdline").read_bytes().split(b"\0")
            assert str(lab.config).encode() in words
            labs.stop_daemon(lab, host)
            assert not before.alive
            assert lab.machine(host).running
            labs.start_daemon(lab, host)
            after = lab.machine(host).daemon
            assert after is not None
            assert after != before
        labs.wait_ready(lab)
