# SPDX-License-Identifier: Apache-2.0
"""What a capsule's own processes can't reach: tried from inside, as a user and as root.

Every "cannot" has its "can" beside it: the same thing done where it is allowed, so that a probe
that is merely broken is noticed. All of it holds on the host where a capsule was started and on
the one it was moved to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lab_session import JOBS, LabSession, NewLab, eventually
from moving_job import Job
from open_python import NOBODY, OpenPython

from liveshift.launcher import lab as labs
from liveshift.runtime.config.cluster import Cluster, load

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

ANOTHER = NOBODY - 1
"""A user who has no job."""
PORT = 5000
VXLAN = 4789
ABSTRACT = "\0liveshift-prober"


class Inside:
    """A job of probers, one on each of the first hosts, and what its capsules are asked."""

    def __init__(self, job: Job, user: int) -> None:
        self.job, self.user = job, user
        self._asked = [0] * job.nnodes

    def ask(self, index: int, *probes: list[Any]) -> list[Any]:
        number = self._asked[index]
        self._asked[index] += 1
        said = self.job.out / f"{index}-said-{number}.json"
        half = self.job.out / f"{index}-half-ask"
        half.write_text(json.dumps(probes))
        half.rename(self.job.out / f"{index}-ask-{number}.json")
        eventually(said.exists, f"{self.job.name}/{index} to answer {probes}", 60)
        return list(json.loads(said.read_text()))

    def address(self, index: int) -> str:
        return self.job.capsule(index).address


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, open_python: OpenPython) -> LabSession:
    """Three hosts, and a place on each for a capsule of every job below."""
    options = ("--precopy", "enabled=false")  # so that an image takes its time to come
    return new_lab("--hosts", "3", "--slots", "4", *options, python=open_python.python)


@pytest.fixture(scope="module")
def cluster(lab: LabSession) -> Cluster:
    return load(lab.lab.config)


@pytest.fixture(
    scope="module",
    params=[pytest.param(NOBODY, marks=pytest.mark.long), 0],  # root has more ways out
    ids=["a user", "root"],
)
def mine(
    lab: LabSession, open_python: OpenPython, request: pytest.FixtureRequest
) -> Iterator[Inside]:
    yield from probers(lab, open_python, f"mine-{request.param}", request.param, 3)


@pytest.fixture(scope="module")
def theirs(lab: LabSession, open_python: OpenPython) -> Iterator[Inside]:
    """Another job, of the same user even."""
    yield from probers(lab, open_python, "theirs", NOBODY, 2)


def probers(
    lab: LabSession, open_python: OpenPython, name: str, user: int, nnodes: int
) -> Iterator[Inside]:
    script = shutil.copy(JOBS / "prober.py", open_python.files)
    argv = (open_python.python, str(script), "--out", "{out}")
    job = lab.start(name, argv, nnodes=nnodes, user=user or None)
    inside = Inside(job, user)
    for index in range(nnodes):
        assert job.seen(index).users == {user}
        assert inside.ask(index, ["unix", ABSTRACT]) == ["connected"]
    yield inside
    job.stop()


def on_host(lab: LabSession, host: str, *argv: str) -> str:
    command = [*labs.entry(lab.lab.machine(host)), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def reaches(lab: LabSession, host: str, address: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(({address!r}, {port}), 5)"
    command = [*labs.entry(lab.lab.machine(host)), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0


def hidden(cluster: Cluster) -> list[str]:
    return [str(path) for path in (cluster.paths.run, cluster.paths.state, cluster.paths.keys)]


def test_sockets_state_and_keys_are_not_there(
    lab: LabSession, cluster: Cluster, mine: Inside
) -> None:
    for index in (0, 1):
        host = mine.job.capsule(index).host
        for directory in hidden(cluster):
            assert on_host(lab, host, "ls", "-A", directory), "there is something to hide"
            there = on_host(lab, host, "find", directory, "-maxdepth", "2").split()
            listing, written, *rest = mine.ask(
                index,
                ["list", directory],
                ["write", f"{directory}/mine"],
                *(["read", path] for path in there if path != directory),
            )
            assert listing == []
            assert written in ("EROFS", "EACCES")
            assert set(rest) == {"ENOENT"}
        socket = str(cluster.paths.run / "agent.sock")
        assert on_host(lab, host, "test", "-S", socket) == ""
        assert mine.ask(index, ["unix", socket]) == ["ENOENT"]


def test_control_ports_refuse_and_services_answer(
    lab: LabSession, cluster: Cluster, mine: Inside
) -> None:
    control = [cluster.orchestrator, *(e for h in cluster.hosts for e in (h.data, h.pages))]
    for address, port in control:
        assert reaches(lab, "h0", address, port) or reaches(lab, "h1", address, port)
    for index in (0, 1):
        said = mine.ask(index, *(["tcp", address, port] for address, port in control))
        assert set(said) == {"ECONNREFUSED"}
        gateway = mine.address(index).rpartition(".")[0] + ".254"
        ports = sorted({port for _, port in control})
        assert set(mine.ask(index, *(["tcp", gateway, port] for port in ports))) == {"ECONNREFUSED"}
    with service(lab, "h1") as (address, port):
        assert mine.ask(0, ["tcp", address, port]) == ["connected"]
        assert mine.ask(1, ["tcp", address, port]) == ["connected"]


SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 8088))
print("up", flush=True)
while True: server.accept()[0].close()
"""


@contextmanager
def service(lab: LabSession, host: str) -> Iterator[tuple[str, int]]:
    """A TCP service on a host of the lab."""
    machine = lab.lab.machine(host)
    # Without its pid namespace, so that it is our own child, and ends when told.
    command = [*labs.entry(machine, "--mount", "--net"), sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            yield machine.address, 8088
        finally:
            server.terminate()


def test_vxlan_of_hosts_refuses(cluster: Cluster, mine: Inside) -> None:
    for index in (0, 1):
        silent = {host.address for host in cluster.hosts}

        def refused(index: int = index, silent: set[str] = silent) -> bool:
            asked = sorted(silent)
            said = mine.ask(index, *(["udp", address, VXLAN] for address in asked))
            # The kernel limits the rate of the ICMP that complains, and a move has needed some.
            assert set(said) <= {"EHOSTUNREACH", "no complaint"}
            silent -= {a for a, s in zip(asked, said, strict=True) if s == "EHOSTUNREACH"}
            time.sleep(0.2 if silent else 0)  # asked all the time, it would complain of nobody
            return not silent

        eventually(refused, "the ports to be refused", 30)


def test_another_jobs_overlay_is_out_of_reach(mine: Inside, theirs: Inside) -> None:
    for index in (0, 1):
        other = 1 - index
        said = mine.ask(
            index,
            ["tcp", theirs.address(0), PORT],
            ["tcp", theirs.address(1), PORT],
            ["tcp", theirs.address(0).rpartition(".")[0] + ".254", PORT],
            ["tcp", mine.address(other), PORT],
        )
        assert said == ["EHOSTUNREACH"] * 3 + ["connected"]
        assert theirs.ask(index, ["tcp", mine.address(index), PORT]) == ["EHOSTUNREACH"]
        assert theirs.ask(index, ["tcp", theirs.address(other), PORT]) == ["connected"]


def test_users_of_a_host_do_not_reach_the_ports_of_its_capsules(
    lab: LabSession, mine: Inside
) -> None:
    """Over the bridge of the job, or from another host over its VXLAN; but the user whose job it is
    reaches the one that is here."""
    code = "import socket, sys; print(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))))"
    host = mine.job.capsule(0).host

    def tried(user: int, index: int) -> str:
        as_user = ("setpriv", f"--reuid={user}", "--clear-groups")
        target = mine.address(index), str(PORT)
        said = on_host(lab, host, *as_user, "/usr/bin/python3", "-Sc", code, *target)
        return os.strerror(int(said))

    for index in (0, 1):
        assert tried(ANOTHER, index) == "No route to host"
        theirs = mine.user == NOBODY and not index
        assert tried(NOBODY, index) == ("Success" if theirs else "No route to host")
        assert mine.ask(index, ["tcp", mine.address(1 - index), PORT]) == ["connected"]
    assert reaches(lab, mine.job.capsule(0).host, mine.address(0), PORT), "root does"


def test_abstract_sockets_are_each_network_namespaces_own(
    lab: LabSession, mine: Inside, theirs: Inside
) -> None:
    """Both listen under the same name, on the same host; and so does the host itself."""
    host = mine.job.capsule(0).host
    assert theirs.job.capsule(0).host == host
    name = "\0liveshift-test"
    code = (
        f"import socket\ns = socket.socket(socket.AF_UNIX); s.bind({name!r}); s.listen()\n"
        "print('up', flush=True); s.accept()"
    )
    machine = lab.lab.machine(host)
    command = [*labs.entry(machine, "--mount", "--net"), sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        try:
            assert mine.ask(0, ["unix", name]) == theirs.ask(0, ["unix", name]) == ["ECONNREFUSED"]
            code = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
            on_host(lab, host, sys.executable, "-c", code)
        finally:
            server.terminate()


def test_nobody_speaks_for_another(mine: Inside) -> None:
    one, two = mine.address(1), mine.address(2)
    said = mine.ask(0, ["say", two, "as another", one], ["say", two, "as nobody", "10.1.2.3"])
    assert said == (["sent"] * 2 if mine.job.name == "mine-0" else ["EPERM"] * 2)
    mine.ask(0, ["say", two, "as itself", ""])
    assert mine.ask(2, ["heard", "as itself"]) == [[[mine.address(0), "as itself"]]]
    mine.ask(1, ["say", two, "the right one", ""])
    assert mine.ask(2, ["heard", "the right one"]) == [[[one, "the right one"]]]


def test_what_hides_cannot_be_taken_away(cluster: Cluster, mine: Inside) -> None:
    """Not by root in a capsule, nor by a user who makes themselves root of a namespace."""
    for directory in hidden(cluster):
        commands = (
            ["umount", directory],
            ["umount", "-l", directory],
            ["mount", "-o", "remount,rw", directory],
            ["unshare", "-rm", "umount", directory],
            ["unshare", "-rm", "umount", "-l", directory],
            ["unshare", "-rm", "ls", "-A", directory],
        )
        for said in mine.ask(0, *(["run", *words] for words in commands[:-1])):
            assert not said.startswith("0 "), said
        assert mine.ask(0, ["list", directory]) == [[]]
        (said,) = mine.ask(0, ["run", *commands[-1]])
        assert said == "0 " or "unshare" in said
    others = mine.ask(
        0,
        ["run", "nsenter", "--target", "1", "--mount", "true"],
        ["list", "/proc/1/root/"],
        ["run", "nsenter", "--net=/run/netns/ls-mine-0.1", "true"],
        ["run", "mknod", "/tmp/disk", "b", "8", "0"],
        ["run", "ip", "link", "set", "eth0", "down"],
    )
    assert not [said for said in others if said[:2] == "0 " or isinstance(said, list)], others


def test_images_are_not_there_while_another_capsule_moves(
    lab: LabSession, cluster: Cluster, mine: Inside, theirs: Inside
) -> None:
    images = str(cluster.paths.run / "images")
    source, destination = theirs.job.capsule(1).host, mine.job.capsule(2).host
    assert source != destination
    for host in (source, destination):
        assert host in {mine.job.capsule(n).host for n in range(3)}, "somebody looks there"
    lab.cli("lab", "link", destination, "--rate", "8mbit")
    with lab.popen("migrate", f"{theirs.job.name}/1", "--to", destination) as moving:
        eventually(
            lambda: "img" in on_host(lab, destination, "find", images, "-name", "*.img"),
            "an image to arrive",
            60,
        )
        assert "verdict" in on_host(lab, source, "find", images, "-name", "verdict")
        for index in range(3):
            said = mine.ask(index, ["list", str(cluster.paths.run)], ["list", images])
            assert said == [[], "ENOENT"]
        lab.cli("lab", "link", destination, "--rate", "none")
        assert moving.wait(60) == 0, moving.communicate()
        moving.communicate()
    assert theirs.job.capsule(1).host == destination
    lab.cli("migrate", f"{theirs.job.name}/1", "--to", source)


def test_all_of_it_holds_after_a_move(
    lab: LabSession, cluster: Cluster, mine: Inside, theirs: Inside
) -> None:
    before = mine.ask(1, ["rights"])
    home = mine.job.capsule(1).host
    mine.job.migrate(1, to="h2" if home != "h2" else "h1")
    assert mine.job.capsule(1).host != home
    assert mine.ask(1, ["rights"]) == before
    test_sockets_state_and_keys_are_not_there(lab, cluster, mine)
    test_control_ports_refuse_and_services_answer(lab, cluster, mine)
    test_vxlan_of_hosts_refuses(cluster, mine)
    test_another_jobs_overlay_is_out_of_reach(mine, theirs)
    test_users_of_a_host_do_not_reach_the_ports_of_its_capsules(lab, mine)
    test_nobody_speaks_for_another(mine)
    said = mine.ask(1, ["unix", ABSTRACT], ["run", "umount", str(cluster.paths.run)])
    assert said[0] == "connected"
    assert not said[1].startswith("0 ")
