# SPDX-License-Identifier: Apache-2.0
"""The lab's hosts are hosts: their own views, links that misbehave on demand, nothing left behind.

Most tests need hosts but no daemons, and make a lab without them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from liveshift.errors import LiveshiftError, NotFound, Refused
from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab, making, wiring
from liveshift.launcher.lab.tasks import Task

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

LOCAL = "/var/lib/liveshift-test-local"


def without_daemons(name: str, hosts: int = 3, **options: list[str]) -> Lab:
    with making.fresh(name, hosts, **options) as lab:  # type: ignore[arg-type]
        wiring.make_switch(lab)
        for machine in lab.machines:
            making.boot(lab, machine)
        lab.state = "up"
        lab.save()
    return lab


def output(lab: Lab, host: str, *argv: str) -> str:
    command = [*labs.entry(lab.machine(host)), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def reaches(lab: Lab, source: str, destination: str, seconds: float = 2.0) -> bool:
    """Does a TCP connection get through (a refusal is an answer too)?"""
    address = lab.machine(destination).address
    code = f"import socket\ntry: socket.create_connection(({address!r}, 9), {seconds})\n"
    code += "except ConnectionRefusedError: print('answered')\nexcept OSError: pass"
    return output(lab, source, sys.executable, "-c", code).strip() == "answered"


RECEIVE = """
import socket, sys, time
s = socket.create_server((sys.argv[1], 7777)); print("ready", flush=True)
c, _ = s.accept(); n = 0; began = None
while part := c.recv(1 << 20):
    began = began or time.monotonic(); n += len(part)
print(n, time.monotonic() - began)
"""

SEND = """
import socket, sys
c = socket.create_connection((sys.argv[1], 7777)); left = int(sys.argv[2]); part = bytes(1 << 16)
while left > 0: c.sendall(part); left -= len(part)
"""


def throughput(lab: Lab, source: str, destination: str, size: int) -> float:
    """Bit/s of one TCP connection, as the receiver sees it."""
    to = lab.machine(destination)
    receiver = subprocess.Popen(
        [*labs.entry(to), sys.executable, "-c", RECEIVE, to.address],
        stdout=subprocess.PIPE,
        text=True,
    )
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        output(lab, source, sys.executable, "-c", SEND, to.address, str(size))
        received, seconds = receiver.stdout.read().split()
    assert int(received) >= size
    return 8 * int(received) / float(seconds)


COUNT = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 7778))
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


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something holds; fails when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fresh_name() -> str:
    return f"t{secrets.token_hex(3)}"


@pytest.fixture(scope="module", autouse=True)
def lab_root() -> Iterator[Path]:
    """Right below /tmp: sockets' paths may not be long, and pytest's own directories can be."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="liveshift-labs-", dir="/tmp") as path,
    ):
        os.chmod(path, 0o755)
        patch.setenv("LIVESHIFT_LAB_ROOT", path)
        yield Path(path)


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


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a lab that the test makes itself; the lab goes in any case."""
    name = fresh_name()
    yield name
    labs.down(name)
    assert labs.leftovers(name) == []


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
        with pytest.raises(Refused, match="h1 cannot be cut off from itself"):
            labs.separate(lab, "h1", "h1")
        with pytest.raises(NotFound, match='no host "h9"'):
            labs.separate(lab, "h1", "h9")
        assert labs.find(lab.name).cuts == []

    def test_a_rate_holds_in_both_directions(self, lab: Lab) -> None:
        assert throughput(lab, "h0", "h1", 32 << 20) > 1e9
        labs.link(lab, "h0", rate="80mbit")
        for source, destination in (("h0", "h1"), ("h1", "h0")):
            assert 60e6 < throughput(lab, source, destination, 4 << 20) < 90e6
        assert throughput(lab, "h1", "h2", 32 << 20) > 1e9
        labs.link(lab, "h0", rate="none")
        assert throughput(lab, "h0", "h1", 32 << 20) > 1e9

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
        with pytest.raises(Refused, match='"fast" is no rate'):
            labs.link(lab, "h1", rate="fast")
        with pytest.raises(Refused, match="a loss of 101"):
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
        with pytest.raises(Refused, match="there are 2 labs"):
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
        # A room within the room, as a capsule is: all namespaces of its own, its network named.
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

    # 1, 2: the switch; then six for each of four hosts: 3 wire it, the room, what is in it, daemon
    @pytest.mark.parametrize("child", [1, 3, 6, 7, 8, 12, 18, 26])
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
    def test_up_is_quick_and_its_daemons_can_be_stopped_and_started(self, name: str) -> None:
        began = time.monotonic()
        lab = labs.up(name, 3)
        assert time.monotonic() - began < 10  # about 2 s on two free cores
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
