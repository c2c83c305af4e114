# SPDX-License-Identifier: Apache-2.0
"""A lab of the tests' own, driven by the command line as a person would drive it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fault_matrix.full import filled
from moving_job import Job
from whereabouts import on_lab, runs

from liveshift.errors import LiveshiftError, Unreachable
from liveshift.launcher import lab as labs
from liveshift.launcher.client.client import Client
from liveshift.launcher.lab import Lab
from liveshift.runtime.config.cluster import load
from liveshift.runtime.messages import Event, Events, GetEvents, GetStatus, HostRow, Status

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "integration" / "jobs"
SUPPORT = ROOT / "integration" / "support"
GPT = ROOT / "examples" / "train_gpt.py"
BIN = Path(sys.executable).parent
TORCHRUN = ("torchrun", "--nproc-per-node", "1")
LONG = (
    *("python", str(JOBS / "tiny.py"), "--out", "{out}"),
    *("--steps", "6000", "--pace", "0.1", "--enough", "{out}/enough"),
)
"""A DDP job of two that goes on until it is told that it is enough (Job.stop)."""

CHAIN = ("python", str(JOBS / "chain.py"), "--out", "{out}", "--enough", "{out}/enough")
"""The same of one process without torch, which is there at once."""

BRISK = ("--precopy", "slow_down=0.9,way=rounds")
AS_EVER = ("--precopy", "slow_down=0.2,way=rounds")
AUTO = ("--precopy", "way=auto")
"""Options of ``lab up``. Most tests are of memory that goes ahead, whatever would cost their small
jobs least; AUTO is the default outside of them."""

NOT_OURS = (
    *("LIVESHIFT_", "LD_PRELOAD", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_"),
    "TORCHINDUCTOR_",
)
"""Variables of whoever runs the tests that would mean something to the programs under test."""

OURS = ("LIVESHIFT_CRIU", "LIVESHIFT_FAULTPOINTS")
"""Those that a test run means for them."""

T = TypeVar("T")
NewLab = Callable[..., "LabSession"]
"""Of :func:`conftest.new_lab`: takes the options of ``lab up``."""


@dataclass(frozen=True)
class Said:
    """What a command ended with and said."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """As a person's terminal has it, with the tests' own Python first in the path."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}
    kept |= {k: os.environ[k] for k in OURS if k in os.environ}
    path = f"{BIN}:{os.environ.get('PATH', os.defpath)}"
    return kept | {"PATH": path, "COLUMNS": "200", "TERM": "dumb", **more}


def command(*words: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "liveshift.launcher", *words]


def eventually(look: Callable[[], T], what: str, timeout: float = 60.0) -> T:
    """What ``look`` returns once that is true; fails after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while not (found := look()):
        assert time.monotonic() < until, f"{what}: not within {timeout:g} s"
        time.sleep(0.02)
    return found


class LabSession:
    """One lab; made by :func:`a_lab` and removed by it, whatever happens in between."""

    def __init__(self, name: str, place: Path, python: str = sys.executable) -> None:
        self.name = name
        self.place = place
        self.python = python
        self.jobs: list[Job] = []

    @property
    def lab(self) -> Lab:
        return labs.find(self.name)

    def cli(
        self,
        *words: str,
        code: int | None = 0,
        timeout: float = 90.0,
        user: int | None = None,
        python: str = "",
    ) -> Said:
        """Run a ``liveshift`` command on this lab; its exit code must be ``code``, unless None."""
        done = subprocess.run(
            command(*words, python=python or self.python),
            env=environment(LIVESHIFT_LAB=self.name),
            cwd=ROOT if user is None else "/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            **_as_user(user),
        )
        said = Said(done.returncode, done.stdout, done.stderr)
        assert code is None or said.code == code, f"liveshift {' '.join(words)}: {said}"
        return said

    def json(self, *words: str, user: int | None = None) -> Any:
        return json.loads(self.cli(*words, "-o", "json", user=user).out)

    def refused(self, *words: str, code: int = 5, user: int | None = None, python: str = "") -> str:
        """Run a command that must fail; returns what it said, as one line of single spaces."""
        said = self.cli(*words, code=code, user=user, python=python)
        assert not said.out, f"a refusal belongs on stderr: {said}"
        assert "Traceback" not in said.err, said.err
        return " ".join(said.err.split())

    def popen(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command that stays in the foreground, its output captured."""
        return subprocess.Popen(
            command(*words, python=self.python),
            env=environment(LIVESHIFT_LAB=self.name),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def status(self) -> Status:
        with Client(self.lab.socket) as client:
            return client.get(Status, GetStatus())

    def history(self, subject: str) -> list[Event]:
        """All events of a job; waits for an orchestrator that has only just been started."""

        def look() -> list[Event]:
            with suppress(Unreachable), Client(self.lab.socket) as client:
                return client.get(Events, GetEvents(subject, 0)).events
            return []

        return eventually(look, "the orchestrator to answer", 20)

    def start(
        self,
        name: str,
        argv: Sequence[str],
        nnodes: int = 1,
        user: int | None = None,
        options: Sequence[str] = (),
    ) -> Job:
        """``liveshift run --detach``; ``{out}`` in the command is the job's directory."""
        out = self.place / f"{self.name}-{name}"
        out.mkdir()
        if user is not None:
            os.chown(out, user, user)
        words = [word.replace("{out}", str(out)) for word in argv]
        run = ("run", "--detach", "--nnodes", str(nnodes), "--name", name, *options, "--", *words)
        assert self.cli(*run, user=user).out.strip() == name
        job = Job(self, name, argv, nnodes, out)
        self.jobs.append(job)
        return job

    def host(self, name: str) -> HostRow:
        return next(row for row in self.status().hosts if row.name == name)

    def data_address(self, host: str) -> str:
        """Where a host listens for images."""
        return str(load(self.lab.config).host(host).data)

    def own(self, host: str, path: Path) -> Path:
        """A path in a directory of each host's own (``--local``), as this machine sees it."""
        return self.lab.directory / host / "local" / str(path).lstrip("/")

    def images_full(self, host: str) -> AbstractContextManager[None]:
        """The host's memory for images takes nothing more."""
        init = self.lab.machine(host).init
        assert init is not None
        return filled(Path("/run/liveshift/images"), inside=init.pid)

    def stop_agent(self, host: str) -> None:
        """SIGKILL; the orchestrator counts the host as up for some seconds more."""
        labs.stop_daemon(self.lab, host)

    def start_agent(self, host: str) -> None:
        """Start it again, and wait until it has reported."""
        before = self._reports(host)
        labs.start_daemon(self.lab, host)
        eventually(lambda: self._reports(host) > before, f"the agent of {host} to report", 20)

    def boot(self, host: str) -> None:
        """Switch a host on that was switched off, and wait until it is up."""
        labs.boot_host(self.lab, host)
        self.start_agent(host)
        eventually(lambda: self.host(host).state == "up", f"{host} to be up", 20)

    def _reports(self, host: str) -> int:
        return self.lab.log(host).read_text().count("reported to the orchestrator")

    def up(self, *options: str) -> None:
        """``lab up``. Most tests are of moves, so jobs have snapshots only where these ask."""
        if "--snapshots" not in options:
            options = (*options, "--snapshots", "every=off")
        self.cli("lab", "up", self.name, *options)

    def down(self) -> None:
        """End the lab and look, with our own eyes too, whether anything is left."""
        if self.name not in labs.names() and not labs.leftovers(self.name):
            return
        tasks: set[tuple[int, int]] = set()
        with suppress(LiveshiftError):  # one that is half made
            tasks = on_lab(self.lab)
        self.cli("lab", "down", self.name)
        assert_nothing_left(self.name, tasks)

    def last_words(self) -> str:
        """What helps to understand a failure: history, and the ends of logs. Never raises."""
        found = []
        with suppress(Exception):
            found += [self.cli("events", "-o", "wide").out]
        with suppress(Exception):
            for log in sorted((self.lab.directory / "log").iterdir()):
                found += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-12:]]
        with suppress(Exception):
            job = self.jobs[-1]
            found += [f"--- output of {job.name}", *job.output().splitlines()[-20:]]
        return "\n".join(found)


@contextmanager
def a_lab(
    name: str, place: Path, *options: str, python: str = sys.executable
) -> Iterator[LabSession]:
    """A lab for as long as this lasts; nothing is left of it afterwards."""
    session = LabSession(name, place, python)
    try:
        session.up(*options)
        yield session
    finally:
        session.down()


def assert_nothing_left(name: str, tasks: set[tuple[int, int]]) -> None:
    """No namespace, link, mount, process or directory of a lab; ``tasks`` are those it had."""
    assert labs.leftovers(name) == []
    assert [n for n in os.listdir("/run/netns") if n.startswith(f"ls-{name}-")] == []
    assert [n for n in os.listdir("/sys/class/net") if n.startswith(f"ls-{name}-")] == []
    assert f"/{name}/" not in Path("/proc/self/mountinfo").read_text()
    alive = [pid for pid, since in tasks if runs(pid, since)]
    assert alive == [], f"processes of lab {name} still run"
    rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True)
    assert "liveshift" not in rules.stdout, "rules on the machine itself"


def _as_user(user: int | None) -> dict[str, Any]:
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}
