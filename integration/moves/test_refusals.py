# SPDX-License-Identifier: Apache-2.0
"""What liveshift turns down, in words that help, while the job trains on undisturbed.

One DDP job runs through all of this file; after every refusal it must have gone on where it was,
and at the end its losses and parameters are those of a run that nobody disturbed. What stands in
the way of a move is held by small jobs of their own (jobs/chain.py).

    h0 h1   the long job, a rank each      h3   offers hardly any memory
    h2      a spare                        h4   receives nothing
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain_job import assert_whole_chain
from lab_session import CHAIN, LONG, SUPPORT, LabSession, NewLab, eventually
from machine_needs import needs_fact
from moving_job import Job
from open_python import NOBODY, OpenPython
from outside_server import PORT, outside_server
from reference_runs import References

from liveshift.criu_glue.survey.survey import build_id
from liveshift.launcher import lab as labs
from liveshift.runtime.control import keys

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

OLD_CRIU = """#!/bin/sh
echo Version: 3.17
"""


@pytest.fixture(scope="module")
def local(place: Path) -> Path:
    """A directory that every host has for itself, on no list in the cluster file."""
    path = place / "local"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, local: Path) -> LabSession:
    return new_lab(
        *("--hosts", "5", "--slots", "2", "--memory", "h3=64MiB", "--spare", "h4=none"),
        *("--local", str(local)),
    )


@pytest.fixture(scope="module")
def long_job(lab: LabSession) -> Job:
    job = lab.start("long", LONG, nnodes=2)
    job.wait_step(5)
    return job


@pytest.fixture
def long(long_job: Job) -> Iterator[Job]:
    """The long job, which this test must not disturb."""
    yield long_job
    long_job.go_on(3)
    assert [long_job.seen(index).host for index in (0, 1)] == ["h0", "h1"]
    done = [row for row in long_job.migrations() if row.state == "done"]
    assert len(done) == len(long_job.moves), "it moved, and nobody said so"


@pytest.fixture
def chain(lab: LabSession) -> Iterator[Callable[..., Job]]:
    """Starts a small job on h0, which ends with the test and must be whole then."""
    started: list[Job] = []

    def start(*words: str) -> Job:
        started.append(lab.start(f"chain{len(lab.jobs)}", (*CHAIN, *words)))
        started[0].wait_step(3)
        assert started[0].seen(0).host == "h0"
        return started[0]

    yield start
    for job in started:
        job.go_on(3)
        job.stop()
        assert_whole_chain(job)


# ---- names that mean nothing, and what makes no sense -------------------------------------------


def test_what_a_capsule_would_not_find_below_tmp_is_said_before_it_starts(
    lab: LabSession, long_job: Job, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    words = ("run", "--name", "below", "--", "python", str(tmp_path / "train.py"))
    said = lab.refused(*words, code=2)
    assert f"the script {tmp_path}/train.py is not there in a capsule" in said
    assert [job.name for job in lab.status().jobs] == [long_job.name]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("migrate nope/0", 4, 'no job "nope" hint: known jobs: .*long'),
        ("stop lomg", 4, 'no job "lomg" hint: did you mean long\\?'),
        ("migrate long/7", 4, 'job long has no capsule "long/7" hint: .*long/0, long/1'),
        ("migrate long", 4, 'no capsule "long" hint: .*long/0, long/1'),
        ("migrate long/1 --to h9", 4, 'no host "h9" .* hint: .*h0, h1, h2, h3, h4'),
        ("migrate long/1 --to h9 --dry-run", 4, 'no host "h9"'),
        ("migrate long/1 --to h1", 5, "cannot move to h1: h1 is where it runs already"),
        ("migrate long/1 --to h4", 5, "cannot move to h4: h4 receives nothing"),
        ("taint host h9", 4, 'no host "h9"'),
        ("drain h9", 4, 'no host "h9"'),
        ("logs nope", 4, 'no job "nope" hint: .*long'),
        ("logs long/9", 4, 'no capsule "long/9"'),
        ("events nope", 4, 'nothing is known of "nope"'),
        ("status nope", 4, 'no job "nope"'),
        ("stop nope", 4, 'no job "nope"'),
        ("run --name long -- true", 5, 'a job "long" is running already'),
        ("run --name Bad_Name -- true", 2, 'invalid job name "Bad_Name"'),
        ("run --nnodes 50 -- true", 5, "asks for 50 hosts, but only 8 slots are free"),
        ("migrate", 2, "CAPSULE"),
        ("migrate long/1 --too h2", 2, "--too"),
        ("taint a b c", 2, "not one host"),
    ],
)
def test_words_that_mean_nothing(
    lab: LabSession, long: Job, words: str, code: int, said: str
) -> None:
    assert re.search(said, lab.refused(*words.split(), code=code))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("migrate long/1", "nobody may not move long/1: it is another user's"),
        ("stop long", "nobody may not end long: it is another user's"),
        ("logs long/1", "nobody may not read the output of long: it is another user's"),
        ("taint h1", "nobody may not taint h1: that needs the role"),
        ("lab down", "needs root"),
    ],
)
def test_other_users_jobs(
    lab: LabSession, long: Job, open_python: OpenPython, words: str, said: str
) -> None:
    assert said in lab.refused(*words.split(), code=7, user=NOBODY, python=open_python.python)


def test_no_spare(lab: LabSession, long: Job, chain: Callable[..., Job]) -> None:
    chain()  # the second of h0's two slots
    try:
        lab.cli("taint", "h2", "--reason", "being repaired")
        lab.cli("cordon", "h3")
        said = lab.refused("migrate", "long/1")
        reasons = "h0 has no free slot; h1 is where it runs already; h2 is tainted; h3 is cordoned"
        assert f"no spare can take long/1: {reasons}; h4 receives nothing" in said
        said = lab.refused("drain", "h1", "--dry-run")
        assert "h1 would not become empty: no spare can take long/1" in said
        assert lab.host("h1").taint is None, "it was only tried"
        said = lab.refused("drain", "h1", "--reason", "to be repaired too")
        assert "long/1 cannot leave h1: no spare can take long/1" in said
        assert "h1 stays tainted; `liveshift uncordon h1` takes that back" in said
        assert "only 2 slots are free" in lab.refused("run", "--nnodes", "3", "--", "true")
    finally:
        for host in ("h1", "h2", "h3"):
            lab.cli("uncordon", host)


# ---- what the preflight finds at the destination -------------------------------------------------


def library() -> tuple[Path, bytes]:
    """A shared library and its build id; the one that has it farthest from its beginning, as
    patched libraries do."""
    found = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    idents: dict[Path, bytes] = {}
    for path in (Path(name) for name in found if ".so" in name):
        with path.open("rb") as file:
            idents[path] = bytes.fromhex(build_id(file))
    where = {path: path.read_bytes().find(ident) for path, ident in idents.items() if ident}
    farthest = max(where, key=where.__getitem__)
    return farthest, idents[farthest]


@pytest.mark.parametrize(
    "wrong", ["missing", *(pytest.param(w, marks=pytest.mark.long) for w in ("size", "build"))]
)
def test_mapped_file_that_the_destination_lacks(
    lab: LabSession, long: Job, local: Path, chain: Callable[..., Job], wrong: str
) -> None:
    path, ident = library()
    right = path.read_bytes()
    name = local / f"{wrong}.so"
    own = {host: lab.own(host, name) for host in ("h0", "h2")}
    own["h0"].write_bytes(right)
    bad = {"size": right + b"more", "build": right.replace(ident, ident[::-1])}
    said = f"h2 lacks {name}"
    if wrong in bad:
        own["h2"].write_bytes(bad[wrong])
        said = f"h2 has a different {name} ("
        said += f"{len(right)} bytes at the source" if wrong == "size" else "another build id"
    job = chain("--map", str(name))
    for more in ((), ("--dry-run",)):
        refusal = lab.refused("migrate", job.name, "--to", "h2", *more)
        assert said in refusal
        assert "hint: install the same files with the same modes at the same paths" in refusal
    own["h2"].write_bytes(right)
    job.migrate(0, to="h2")


def test_file_on_an_unlisted_file_system(
    lab: LabSession, long: Job, local: Path, chain: Callable[..., Job]
) -> None:
    job = chain("--open", str(local / "written"))
    said = lab.refused("migrate", job.name)
    assert f"has {local}/written open for writing" in said
    assert f"file system {local}, which is listed neither under files.shared nor" in said
    assert "open for writing" in lab.refused("migrate", job.name, "--dry-run")


def test_not_enough_memory(lab: LabSession, long: Job) -> None:
    for more in ((), ("--dry-run",)):
        said = lab.refused("migrate", "long/1", "--to", "h3", *more)
        needed = re.search(r"h3 has not enough memory: (\d+) MB are needed .* 67.1 MB are of", said)
        assert needed, said
        assert int(needed[1]) > 200
        assert "choose a host with more free memory" in said


@pytest.fixture
def perf_allowed() -> Iterator[None]:
    """Users may have perf events, which Debian's kernel lets only root have."""
    setting = Path("/proc/sys/kernel/perf_event_paranoid")
    before = setting.read_text() if setting.exists() else "2"
    if int(before) > 2:
        setting.write_text("2")
    yield
    if int(before) > 2:
        setting.write_text(before)


@pytest.mark.usefixtures("perf_allowed")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("userfaultfd", "holds a userfaultfd, which CRIU cannot dump hint: close it"),
        pytest.param(
            "fanotify", "holds a fanotify group, which CRIU cannot dump", marks=pytest.mark.long
        ),
        pytest.param(
            *("perf", "holds a perf event, which CRIU cannot dump hint: end the profiler"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_something_that_cannot_be_dumped(
    lab: LabSession, long: Job, chain: Callable[..., Job], what: str, said: str
) -> None:
    needs_fact({"perf": "perf events"}.get(what, what))
    job = chain("--hold", what)
    held = job.steps()[0]["held"]
    assert held >= 0, os.strerror(-held)
    for more in ((), ("--dry-run",)):
        assert said in lab.refused("migrate", job.name, "--to", "h2", *more)


def test_io_uring_is_not_there(lab: LabSession, long: Job, chain: Callable[..., Job]) -> None:
    job = chain("--hold", "io_uring")
    assert os.strerror(-job.steps()[0]["held"]) == "Function not implemented"
    job.migrate(0, to="h2")


NO_CRIU = "has no CRIU, or one that is too old hint: run `liveshift doctor` on"


@pytest.mark.parametrize(
    ("kind", "host", "said"),
    [
        (
            "missing",
            "h2",
            f"h2 {NO_CRIU} h2",
        ),
        (
            "too old",
            "h2",
            f"h2 {NO_CRIU} h2",
        ),
        pytest.param("too old", "h1", f"h1 {NO_CRIU} h1", marks=pytest.mark.long),
    ],
)
def test_criu_missing_or_too_old(
    lab: LabSession, long: Job, place: Path, kind: str, host: str, said: str
) -> None:
    program = place / "old-criu"
    if kind == "too old":
        program.write_text(OLD_CRIU)
        program.chmod(0o755)
    config = lab.lab.config
    good = config.read_text()
    without = "".join(x for x in good.splitlines(keepends=True) if not x.startswith("criu"))
    config.write_text(without.replace("[paths]\n", f'[paths]\ncriu = "{program}"\n'))
    try:
        lab.stop_agent(host)
        lab.start_agent(host)
        for more in ((), ("--dry-run",)):
            assert said in lab.refused("migrate", "long/1", "--to", "h2", *more)
    finally:
        config.write_text(good)
        lab.stop_agent(host)
        lab.start_agent(host)
    assert "CRIU" in lab.cli("migrate", "long/1", "--to", "h2", "--dry-run").out


REACH = f"""
import socket, sys, time
held = socket.create_connection((sys.argv[1], {PORT}))
while True: time.sleep(0.1)
"""


def test_a_connection_to_outside_the_cluster_is_named_before_the_move_breaks_it(
    lab: LabSession, long: Job
) -> None:
    """What a capsule has outside of the cluster is masqueraded."""
    with outside_server(lab) as (address, met):
        job = lab.start("reaching", (sys.executable, "-c", REACH, address))
        met()
        found = re.escape(f"breaks a connection to outside the cluster: {address}:{PORT}")
        plan = lab.json("migrate", job.name + "/0", "--to", "h2", "--dry-run")
        (warning,) = (text for what, text in plan["checks"] if what == "warning")
        assert re.fullmatch(found + r", of process 1001 \(python\S*\)", warning)
        job.migrate(0, to="h2")
        told = [event.text for event in lab.history(job.name)]
        assert len([text for text in told if re.match(found, text)]) == 1
        lab.cli("stop", job.name)


# ---- the wrong moment ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_second_migration_of_a_capsule_on_its_way(lab: LabSession, long: Job) -> None:
    lab.cli("lab", "link", "h2", "--rate", "20mbit")  # a minute and a half, if nothing changes it
    with lab.popen("migrate", "long/1", "--to", "h2") as moving:
        try:
            eventually(lambda: long.capsule(1).state == "moving", "the move to begin", 10)
            for more in ((), ("--to", "h0"), ("--dry-run",)):
                assert "long/1 is moving already (m" in lab.refused("migrate", "long/1", *more)
        finally:
            lab.cli("lab", "link", "h2", "--rate", "none")
        moving.communicate(timeout=60)
        assert moving.returncode == 0
    long.moves.append(long.migrations()[-1])
    assert long.seen(1).host == "h2"
    long.migrate(1, to="h1")


@pytest.mark.long
def test_agent_down_at_the_destination(lab: LabSession, long: Job) -> None:
    lab.stop_agent("h2")
    said = lab.refused("migrate", "long/1", "--to", "h2", code=5)
    assert re.search("h2 (stopped answering|is not connected)", said), said
    eventually(lambda: lab.host("h2").state == "lost", "h2 to count as lost", 15)
    assert "cannot move to h2: h2 is not up" in lab.refused("migrate", "long/1", "--to", "h2")
    lab.start_agent("h2")
    lab.cli("migrate", "long/1", "--to", "h2", "--dry-run")


def test_agent_down_at_the_source(lab: LabSession, long: Job, chain: Callable[..., Job]) -> None:
    job = chain()
    lab.stop_agent("h0")
    try:
        first = lab.cli("migrate", job.name, "--to", "h2", code=None)
        if first.code != 6:  # on a busy machine the command may begin when h0 is lost already
            assert first.code == 5, first
            assert re.search("h0 (stopped answering|is not connected)", first.err), first
        eventually(lambda: lab.host("h0").state == "lost", "h0 to count as lost", 15)
        said = lab.refused("migrate", job.name, code=6)
        assert f"the agent on h0, where {job.name}/0 runs, does not answer" in said
        assert "start it there: liveshift agent" in said
        for each in (job, long):
            each.go_on(5)
    finally:
        lab.start_agent("h0")
    job.migrate(0, to="h2")  # the new agent knows what runs on its host


def test_wrong_key(lab: LabSession, long: Job) -> None:
    made = lab.lab
    directory = made.directory / "keys"
    public = {name: key.decode() for name, key in keys.public_keys(directory).items()}
    right = keys.load_private(directory, "h4")
    doors = {
        "orchestrator": f"tcp://{made.control.address}:7400",
        "h1": "tcp://" + lab.data_address("h1"),
    }
    for name, endpoint in doors.items():
        knock = [*labs.entry(made.machine("h4")), sys.executable]
        knock += [str(SUPPORT / "knock.py"), endpoint, public[name]]
        for own, outcome in (
            ((), "turned away"),
            ((right.public.decode(), right.secret.decode()), "open"),
        ):
            said = subprocess.run([*knock, *own], capture_output=True, text=True, timeout=30)
            assert (said.stdout.strip(), said.stderr) == (outcome, ""), f"{name}, {own and 'h4'}"
        log = made.log("ctl" if name == "orchestrator" else name).read_text()
        assert "turned away a peer with an unknown key" in log


# ---- the cluster file ----------------------------------------------------------------------------


def test_config_errors(lab: LabSession, long: Job, tmp_path: Path) -> None:
    good = lab.lab.config.read_text()
    bad = tmp_path / "cluster.toml"
    bad.write_text(good.replace("10.88.0.11", "10.88.0.999").replace("slots = 2", "slots = 0", 1))
    line = bad.read_text().splitlines().index('address = "10.88.0.999"') + 1
    for words in (
        ("config", "validate", str(bad)),
        ("agent", "--config", str(bad), "--host", "h1"),
        ("orchestrator", "--config", str(bad)),
    ):
        said = lab.refused(*words, code=3)
        assert f"{bad}:{line}" in said.replace(" ", "") or f"line {line}" in said, said
        assert "10.88.0.999" in said
        assert "slots" in said, "every mistake is told at once"
    said = lab.refused("agent", "--config", str(lab.lab.config), "--host", "h77", code=4)
    assert 'no host "h77"' in said
    lab.refused("config", "validate", str(tmp_path / "nowhere.toml"), code=3)
    assert lab.cli("config", "validate", str(lab.lab.config)).code == 0


# ---- the end of the long job ---------------------------------------------------------------------


def test_the_long_job_was_not_disturbed(long_job: Job, references: References) -> None:
    long_job.assert_begins_like_never_moved(references)
