# SPDX-License-Identifier: Apache-2.0
"""The lab's hosts are hosts: their own views, links that misbehave on demand, labs side by side.

None of them runs a daemon.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bare_labs import fresh_name, lab_root, name, output, reaches, without_daemons

from liveshift.errors import NotFound, Refused, WrongUsage
from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab

__all__ = ["lab_root", "name"]

pytestmark = pytest.mark.lab

LOCAL = "/var/lib/liveshift-test-local"


RECEIVE = """
import socket, sys, time
s = socket.create_server((sys.argv[1], 7777)); print("ready", flush=True)
c, _ = s.accept(); n = 0
while part := c.recv(1 << 20): n += len(part)
print(n, time.monotonic())
"""

SEND = """
import socket, sys, time
c = socket.create_connection((sys.argv[1], 7777)); left = int(sys.argv[2]); part = bytes(1 << 16)
print(time.monotonic(), flush=True)
while left > 0: c.sendall(part); left -= len(part)
"""


def throughput(lab: Lab, source: str, destination: str, size: int) -> float:
    """Bit/s of one TCP connection, from the first byte sent to the last one received."""
    to = lab.machine(destination)
    receiver = subprocess.Popen(
        [*labs.entry(to), sys.executable, "-c", RECEIVE, to.address],
        stdout=subprocess.PIPE,
        text=True,
    )
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        began = float(output(lab, source, sys.executable, "-c", SEND, to.address, str(size)))
        received, ended = receiver.stdout.read().split()
    assert int(received) >= size
    return 8 * int(received) / (float(ended) - began)


def most(lab: Lab, source: str, destination: str, size: int) -> float:
    """The best of five: other work on this machine makes a transfer slower, never faster."""
    return max(throughput(lab, source, destination, size) for _ in range(5))


COUNT = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 7778))
s.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE: who counts late shall lose none
print("ready", flush=True); n = 0; s.settimeout(10)
while s.recv(100) != b"end": n += 1; s.settimeout(3)
print(n)
"""

DATAGRAMS = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(int(sys.argv[2])):
    s.sendto(b"x", (sys.argv[1], 7778))
    if n % 50 == 0: time.sleep(0.001)
for _ in range(40): s.sendto(b"end", (sys.argv[1], 7778))
"""


def arrived(lab: Lab, source: str, destination: str, sent: int) -> int:
    """How many of ``sent`` datagrams get through."""
    to = lab.machine(destination)
    counter = subprocess.Popen(
        [*labs.entry(to), sys.executable, "-c", COUNT, to.address],
        stdout=subprocess.PIPE,
        text=True,
    )
    with counter:
        assert counter.stdout is not None
        assert counter.stdout.readline() == "ready\n"
        output(lab, source, sys.executable, "-c", DATAGRAMS, to.address, str(sent))
        return int(counter.stdout.read())


@pytest.fixture(scope="module")
def lab(lab_root: Path) -> Iterator[Lab]:
    """Three hosts without daemons, for tests that leave them as they were."""
    had_local = Path(LOCAL).exists()
    lab = without_daemons(fresh_name(), local=[LOCAL])
    yield lab
    labs.down(lab.name)
    assert labs.leftovers(lab.name) == []
    if not had_local:
        Path(LOCAL).rmdir()


class TestViews:
    def test_every_host_has_its_own_address_and_hostname(self, lab: Lab) -> None:
        for host in ("ctl", "h0", "h1", "h2"):
            assert output(lab, host, "hostname").strip() == host
            links = json.loads(output(lab, host, "ip", "-json", "-4", "addr"))
            addresses = [a["local"] for link in links for a in link["addr_info"]]
            assert addresses == ["127.0.0.1", lab.machine(host).address]
        assert len({machine.address for machine in lab.machines}) == 4

    @pytest.mark.parametrize(
        "place",
        ["/tmp", "/var/tmp", "/dev/shm", "/run", "/run/liveshift", "/var/lib/liveshift", LOCAL],
    )
    def test_what_one_host_writes_no_other_sees(self, lab: Lab, place: str) -> None:
        mark = f"{place}/mark-{secrets.token_hex(4)}"
        output(lab, "h0", "sh", "-c", f"echo h0 >{mark}")
        assert output(lab, "h0", "cat", mark) == "h0\n"
        for host in ("h1", "h2", "ctl"):
            assert mark not in output(lab, host, "find", place, "-maxdepth", "1").split()
        assert not os.path.exists(mark)

    def test_the_file_system_is_shared(self, lab: Lab) -> None:
        assert output(lab, "h2", "sh", "-c", "stat -c %i:%d /etc/passwd") == (
            f"{os.stat('/etc/passwd').st_ino}:{os.stat('/etc/passwd').st_dev}\n"
        )

    def test_hosts_know_each_other_by_name(self, lab: Lab) -> None:
        code = "import socket; print(*map(socket.gethostbyname, ('h0', 'h1', 'h2', 'ctl')))"
        assert output(lab, "h1", sys.executable, "-c", code).split() == [
            "10.88.0.10",
            "10.88.0.11",
            "10.88.0.12",
            "10.88.0.2",
        ]

    def test_a_host_sees_its_own_processes_and_devices_only(self, lab: Lab) -> None:
        assert output(lab, "h0", "cat", "/proc/1/comm") == "capsule-init\n"
        pids = [int(p) for p in output(lab, "h0", "ls", "/proc").split() if p.isdigit()]
        assert len(pids) < 10
        assert sorted(output(lab, "h0", "ls", "/sys/class/net").split()) == ["eth0", "lo"]

    def test_named_network_namespaces_are_a_hosts_own(self, lab: Lab) -> None:
        output(lab, "h0", "ip", "netns", "add", "inner")
        assert output(lab, "h0", "ip", "netns").split()[0] == "inner"
        assert output(lab, "h1", "ip", "netns") == ""
        assert not Path("/run/netns/inner").exists()
        output(lab, "h0", "ip", "netns", "del", "inner")

    def test_every_host_reaches_every_other(self, lab: Lab) -> None:
        for source in ("h0", "h1", "h2"):
            for destination in ("ctl", "h0", "h1", "h2"):
                assert reaches(lab, source, destination)

    def test_the_program_and_the_labs_directory_are_there_though_below_tmp(self, lab: Lab) -> None:
        assert str(lab.directory).startswith("/tmp/")
        assert output(lab, "h0", "cat", str(lab.config)) == lab.config.read_text()
        assert output(lab, "h0", sys.executable, "-c", "import liveshift") == ""

    def test_directories_are_open_and_secrets_are_not(self, lab: Lab) -> None:
        for path in (lab.directory, lab.socket.parent, lab.config.parent / "keys"):
            assert path.stat().st_mode & 0o777 == 0o755, path
        for path in lab.directory.rglob("*.key"):
            assert path.stat().st_mode & 0o777 == 0o600, path

    def test_a_command_runs_inside_and_its_exit_code_comes_back(self, lab: Lab) -> None:
        assert labs.run_in(lab, "h1", ["sh", "-c", 'test "$(hostname)" = h1']) == 0
        assert labs.run_in(lab, "h1", ["sh", "-c", "exit 7"]) == 7
        assert labs.run_in(lab, "h1", ["sh", "-c", "kill -KILL $$"]) == 128 + signal.SIGKILL
        assert labs.run_in(lab, "h1", ["liveshift-no-such-program"]) == 127
        with pytest.raises(NotFound, match='no host "h9"'):
            labs.run_in(lab, "h9", ["true"])

    def test_a_lab_is_not_changed_from_inside(self, lab: Lab) -> None:
        code = "import sys; from liveshift.launcher import lab; lab.down(sys.argv[1])"
        command = [*labs.entry(lab.machine("h0")), sys.executable, "-c", code, lab.name]
        done = subprocess.run(command, capture_output=True, text=True)
        assert f"this is host h0 of lab {lab.name}" in done.stderr
        assert all(machine.running for machine in lab.machines)


class TestLinks:
    def test_a_cut_link_is_silent_until_it_is_mended(self, lab: Lab) -> None:
        labs.link(lab, "h1", cut=True)
        assert output(lab, "h1", "cat", "/sys/class/net/eth0/carrier") == "0\n"
        assert not reaches(lab, "h0", "h1", seconds=0.7)
        assert not reaches(lab, "h1", "h2", seconds=0.7)
        assert reaches(lab, "h0", "h2")
        labs.link(lab, "h1", cut=False)
        assert reaches(lab, "h0", "h1")
        assert reaches(lab, "h1", "h2")

    def test_two_machines_cut_off_from_each_other_alone(self, lab: Lab) -> None:
        labs.separate(lab, "h1", "h2")
        labs.separate(lab, "ctl", "h1")
        assert output(lab, "h1", "cat", "/sys/class/net/eth0/carrier") == "1\n"
        for source, destination in (("h1", "h2"), ("h2", "h1"), ("h1", "ctl"), ("ctl", "h1")):
            assert not reaches(lab, source, destination, seconds=0.5)
        for source, destination in (("h0", "h1"), ("h1", "h0"), ("ctl", "h2"), ("h2", "h0")):
            assert reaches(lab, source, destination)
        assert labs.cut_off_from(labs.find(lab.name), "h1") == ["ctl", "h2"]
        labs.rejoin(lab, "h2", "h1")
        assert reaches(lab, "h1", "h2")
        assert not reaches(lab, "h1", "ctl", seconds=0.5)
        labs.rejoin(lab, "ctl", "h1")
        assert reaches(lab, "h1", "ctl")
        with pytest.raises(WrongUsage, match="h1 cannot be cut off from itself"):
            labs.separate(lab, "h1", "h1")
        with pytest.raises(NotFound, match='no host "h9"'):
            labs.separate(lab, "h1", "h9")
        assert labs.find(lab.name).cuts == []

    def test_a_rate_holds_in_both_directions(self, lab: Lab) -> None:
        free = most(lab, "h0", "h1", 32 << 20)
        labs.link(lab, "h0", rate="80mbit")
        for source, destination in (("h0", "h1"), ("h1", "h0")):
            held = most(lab, source, destination, 4 << 20)
            assert 60e6 < held < 90e6
            assert free > 3 * held
            # How much more depends on what the machine does besides.
            assert most(lab, "h1", "h2", 32 << 20) > 3 * held
        labs.link(lab, "h0", rate="none")
        assert most(lab, "h0", "h1", 32 << 20) > 3 * held

    def test_loss_holds_in_both_directions(self, lab: Lab) -> None:
        assert arrived(lab, "h0", "h1", 2000) == 2000
        labs.link(lab, "h0", loss=20)
        for source, destination in (("h0", "h1"), ("h1", "h0")):
            # 20 % of 2000 is 400, with a standard deviation of 18
            assert 2000 - 490 < arrived(lab, source, destination, 2000) < 2000 - 310
        assert arrived(lab, "h1", "h2", 2000) == 2000
        labs.link(lab, "h0", loss=0)
        assert arrived(lab, "h1", "h0", 2000) == 2000

    def test_a_lossy_and_slow_link_still_carries_a_transfer(self, lab: Lab) -> None:
        labs.link(lab, "h2", rate="200mbit", loss=1)
        assert 5e6 < throughput(lab, "h1", "h2", 8 << 20) < 220e6
        assert labs.find(lab.name).hosts["h2"].link == labs.Link(rate=200_000_000, loss=1.0)
        labs.link(lab, "h2", rate="none", loss=0)

    def test_a_delay_is_there_or_refused_with_the_link_as_it_was(self, lab: Lab) -> None:
        labs.link(lab, "h1", rate="500mbit")
        refusal = None
        try:
            labs.link(lab, "h1", delay="20ms")
        except Refused as error:
            refusal = error
        if refusal is None:
            began = time.monotonic()
            assert reaches(lab, "h0", "h1")
            assert time.monotonic() - began > 0.04
        else:
            assert "netem" in refusal.message
            assert "modprobe" in (refusal.hint or "")
            assert labs.find(lab.name).hosts["h1"].link == labs.Link(rate=500_000_000)
            assert "tbf" in output(lab, "h1", "tc", "qdisc", "show", "dev", "eth0")
        labs.link(lab, "h1", rate="none", delay="none")
        assert "tbf" not in output(lab, "h1", "tc", "qdisc", "show", "dev", "eth0")

    def test_a_wrong_value_is_refused(self, lab: Lab) -> None:
        with pytest.raises(WrongUsage, match='"fast" is no rate'):
            labs.link(lab, "h1", rate="fast")
        with pytest.raises(WrongUsage, match="cannot lose 101"):
            labs.link(lab, "h1", loss=101)
        assert labs.find(lab.name).hosts["h1"].link == labs.Link()


class TestSideBySide:
    def test_two_labs_with_the_same_addresses_do_not_meet(self, lab: Lab, name: str) -> None:
        other = without_daemons(name)
        output(lab, "h0", "sh", "-c", "echo first >/tmp/whose")
        output(other, "h0", "sh", "-c", "echo second >/tmp/whose")
        assert output(lab, "h0", "cat", "/tmp/whose") == "first\n"
        labs.link(other, "h1", cut=True)
        assert reaches(lab, "h0", "h1")
        assert not reaches(other, "h0", "h1", seconds=0.5)
        with pytest.raises(WrongUsage, match="there are 2 labs"):
            labs.find()
        labs.down(other.name)
        assert labs.leftovers(other.name) == []
        assert lab.running
        assert reaches(lab, "h0", "h1")
        assert labs.find() == lab

    def test_a_second_lab_of_the_same_name_is_refused(self, lab: Lab) -> None:
        with pytest.raises(Refused, match="is there already"):
            labs.up(lab.name, 3)
        assert all(machine.running for machine in lab.machines)

    def test_a_name_under_another_root_is_left_alone(
        self, lab: Lab, lab_root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = lab_root / "other"
        other.mkdir()
        monkeypatch.setenv("LIVESHIFT_LAB_ROOT", str(other))
        for attempt in (lambda: labs.down(lab.name), lambda: labs.up(lab.name, 2)):
            with pytest.raises(Refused, match=f"belongs to {lab.directory}"):
                attempt()
            (other / lab.name).mkdir(exist_ok=True)  # nor does a directory here make it ours
        assert all(machine.running for machine in lab.machines)
