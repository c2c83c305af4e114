# SPDX-License-Identifier: Apache-2.0
"""Nothing is left behind: no namespace, link, mount, process, rule or directory of a lab.

Whatever state it was in when it ended, and whoever was killed before. ``LabSession.down`` looks,
by the product's own list and by its own eyes (lab_session.assert_nothing_left).
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lab_session import CHAIN, LabSession, assert_nothing_left, environment, eventually
from moving_job import Job
from whereabouts import GONE, on_lab, runs

from liveshift.criu_glue.criu import tool
from liveshift.errors import NotFound
from liveshift.launcher import lab as labs
from liveshift.launcher.lab import wiring

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]


@pytest.fixture
def session(new_lab_name: Callable[[], str], place: Path) -> Iterator[LabSession]:
    """A lab that is not up yet; taken down whatever happens."""
    made = LabSession(new_lab_name(), place)
    yield made
    made.down()


@pytest.fixture
def another(new_lab_name: Callable[[], str], place: Path) -> Iterator[LabSession]:
    made = LabSession(new_lab_name(), place)
    yield made
    made.down()


def a_chain(session: LabSession, name: str = "chain") -> Job:
    job = session.start(name, CHAIN)
    job.wait_step(3)
    return job


def test_lab_down_with_a_running_job_and_one_on_its_way(session: LabSession) -> None:
    session.up("--hosts", "3", "--slots", "2", "--precopy", "enabled=false")
    staying, leaving = a_chain(session, "staying"), a_chain(session, "leaving")
    assert staying.seen(0).host == "h0"
    session.cli("lab", "link", "h2", "--rate", "2mbit")
    with session.popen("migrate", "leaving", "--to", "h2") as moving:
        eventually(lambda: leaving.capsule(0).state == "moving", "the move to begin", 10)
        eventually(lambda: session.status().moving[0].state == "freezing", "the freeze", 20)
        session.down()
        moving.kill()
    assert session.name not in labs.names()


def test_hosts_keep_nothing_of_a_capsule_that_left(session: LabSession) -> None:
    session.up("--hosts", "2")
    job = a_chain(session)
    before = traces(session, "h1")
    job.migrate(0, to="h1")
    assert_traces(session, "h0", before)
    job.migrate(0, to="h0")
    assert_traces(session, "h1", before)
    job.stop()


def assert_traces(session: LabSession, host: str, expected: str) -> None:
    with suppress(AssertionError):
        eventually(lambda: traces(session, host) == expected, "the last of it to go")
    assert traces(session, host) == expected


def traces(session: LabSession, host: str) -> str:
    """What a host has of capsules: processes, namespaces, links, locks, images, directories."""
    script = """
    set -- /proc/[0-9]*/comm; echo $#; ip netns list; ip -o link | grep -o 'lsv[^:@]*'
    nft list tables | grep lock
    find /run/liveshift/images /var/lib/liveshift/capsules /dev/shm /tmp -mindepth 1 -maxdepth 1
    true
    """
    inside = labs.entry(session.lab.machine(host))
    done = subprocess.run([*inside, "sh", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout


MORE_MOMENTS = [pytest.param(each, marks=pytest.mark.long) for each in ("switch", "h0", "h2")]


@pytest.mark.parametrize("moment", ["directory", "agents", *MORE_MOMENTS])
def test_lab_up_killed(session: LabSession, moment: str) -> None:
    def reached() -> bool:
        if session.name not in labs.names() or moment == "directory":
            return session.name in labs.names()
        if moment == "agents":
            with suppress(NotFound):  # its lab.json comes after its directory
                return any(runs_agent(pid) for pid, _ in on_lab(session.lab))
            return False
        name = "sw" if moment == "switch" else moment
        return f"ls-{session.name}-{name}" in wiring.namespaces(session.name)

    with session.popen("lab", "up", session.name, "--hosts", "4") as making:
        eventually(reached, moment)
        making.send_signal(signal.SIGKILL)
    assert labs.leftovers(session.name), "it was killed after it had ended"
    session.down()
    session.up("--hosts", "2")
    assert a_chain(session).seen(0).host == "h0"


def runs_agent(pid: int) -> bool:
    try:
        return b"agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except GONE:
        return False


def test_lab_up_again_after_a_kill(session: LabSession) -> None:
    """Without ``lab down`` in between: what was half made is replaced."""
    with session.popen("lab", "up", session.name, "--hosts", "4") as making:
        eventually(lambda: len(wiring.namespaces(session.name)) > 2, "the first hosts", 20)
        making.send_signal(signal.SIGKILL)
    session.up("--hosts", "2")
    assert [row.name for row in session.status().hosts] == ["h0", "h1"]


def test_lab_up_that_fails_or_is_interrupted(session: LabSession) -> None:
    said = session.refused("lab", "up", session.name, "--spare", "h7=none", code=2)
    assert "spare of h7: no such host in a lab of 3" in said
    assert_nothing_left(session.name, set())
    with session.popen("lab", "up", session.name, "--hosts", "4") as making:
        eventually(lambda: len(wiring.namespaces(session.name)) > 2, "the first hosts", 20)
        making.send_signal(signal.SIGINT)
        making.communicate(timeout=20)
        assert making.returncode == 130
    assert_nothing_left(session.name, set())


def test_run_killed_in_the_foreground(session: LabSession) -> None:
    """The job does not depend on the command that started it."""
    session.up("--hosts", "2")
    out = session.place / f"{session.name}-orphan"
    out.mkdir()
    words = [word.replace("{out}", str(out)) for word in CHAIN]
    with session.popen("run", "--name", "orphan", "--", *words) as running:
        job = Job(session, "orphan", CHAIN, 1, out)
        eventually(lambda: len(job.steps()) > 3, "the first steps", 20)
        running.send_signal(signal.SIGKILL)
    job.go_on(10)
    job.migrate(0, to="h1")
    job.go_on(3)
    tasks = on_lab(session.lab)
    session.down()
    assert not any(runs(pid, since) for pid, since in tasks)
    assert not (out / "final0.json").exists(), "it ended with its lab"


@pytest.mark.long
def test_two_labs_side_by_side(session: LabSession, another: LabSession) -> None:
    """The same addresses, host and job names in both: neither hears of the other."""
    session.up("--hosts", "2")
    another.up("--hosts", "2")
    jobs = [a_chain(lab, "same") for lab in (session, another)]
    for job in jobs:
        job.migrate(0, to="h1")
    assert jobs[0].seen(0).tasks.values() != jobs[1].seen(0).tasks.values()
    session.cli("stop", "same")
    jobs[1].go_on(10)
    session.down()
    jobs[1].go_on(10)
    jobs[1].migrate(0, to="h0")
    assert another.json("status")["hosts"][0]["capsules"] == ["same/0"]
    jobs[1].stop()


def test_the_machine_itself_is_as_before(session: LabSession) -> None:
    def machine() -> list[str]:
        commands = ("ip -o link", "nft list ruleset", "ip rule", "ip route", "sysctl net.ipv4.conf")
        return [
            subprocess.run(c.split(), capture_output=True, text=True, env=environment()).stdout
            for c in commands
        ]

    before = machine()
    session.up("--hosts", "2")
    job = a_chain(session)
    job.migrate(0)
    assert machine() == before, "a lab changes nothing outside of itself, not even while it is up"
    session.down()
    assert machine() == before
    assert tool.find().check()[0], "CRIU still works"
