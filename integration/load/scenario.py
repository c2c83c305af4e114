# SPDX-License-Identifier: Apache-2.0
"""One orchestrator, a number of simulated hosts: connect, start jobs, rest, move, restart, end."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from liveshift.errors import Unreachable
from liveshift.launcher.client.client import Client
from liveshift.runtime import messages
from liveshift.runtime.config.cluster import Cluster
from liveshift.runtime.messages import MigrationDetails, MigrationRow, Named, Status
from liveshift.runtime.model.steps import ENDS, MigrationStep

from . import cluster as clusters
from .agent import Pace, Tally
from .crowd import PER_PROCESS, CrowdProcess, Said
from .daemon import Daemon, Machine, StatusClock, enough_descriptors, eventually
from .figures import Around, AtRest, Moves, Restart, Run, Spread

LONG_S = 300.0
"""Nothing may take longer, with any number of hosts."""
LOOK_S = 0.05
STATUS_EVERY_S = 1.0
OVER = tuple(step.value for step in ENDS)

Tell = Callable[[str], None]


class Scenario:
    """The orchestrator and its crowd, between the phases; see :func:`run`."""

    def __init__(self, cluster: Cluster, daemon: Daemon, crowds: Sequence[CrowdProcess]) -> None:
        self.cluster = cluster
        self.daemon = daemon
        self.crowds = crowds
        self.path = cluster.paths.run / "orchestrator.sock"
        self.client = Client(self.path)
        self.wrong: list[str] = []

    # ---- looking -------------------------------------------------------------------------------

    def said(self, word: str) -> list[Said]:
        """What every crowd says to one word."""
        for crowd in self.crowds:
            crowd.ask(word)
        return [crowd.hear() for crowd in self.crowds]

    def tally(self) -> tuple[Tally, list[float], Machine]:
        """What was seen since the last call, and by how much the crowds themselves were late."""
        whole, lags, cpu = Tally(), list[float](), 0.0
        for said in self.said("tally"):
            lags += said.lags
            cpu += said.cpu
            whole.round_trips += said.tally.round_trips
            whole.silences += said.tally.silences
            whole.hellos += said.tally.hellos
            whole.asked += said.tally.asked
            whole.served += said.tally.served
            whole.claims += said.tally.claims
        return whole, lags, Machine.now(cpu)

    def status(self) -> Status:
        return self.client.get(Status, messages.GetStatus(), timeout=LONG_S)

    def all_up(self) -> bool:
        try:
            hosts = self.status().hosts
        except Unreachable:
            return False
        return all(host.state == "up" for host in hosts)

    def wait_all_up(self) -> None:
        """Every host has said hello, and counts as up."""
        greeted = 0

        def look() -> bool:
            nonlocal greeted
            greeted += self.tally()[0].hellos
            return greeted >= len(self.cluster.hosts)

        eventually(look, "every agent's hello", LONG_S)
        eventually(self.all_up, "every host up", LONG_S)

    def quiet(self) -> None:
        """Wait until the orchestrator asks the agents for nothing any more: beats alone go on."""
        self.tally()

        def look() -> bool:
            time.sleep(2 * self.cluster.timeouts.heartbeat)
            return self.tally()[0].served == 0

        eventually(look, "an end of what the orchestrator asks", LONG_S)

    # ---- the phases, in order ------------------------------------------------------------------

    def connect(self) -> float:
        began = time.monotonic()
        self.wait_all_up()
        return time.monotonic() - began

    def start_jobs(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Seconds until the last one was started, CPU until every host had heard of all."""
        before = self.daemon.cost()
        for number, size in enumerate(sizes):
            argv = ["python", "train.py", "--steps", "100000"]
            env = {f"VARIABLE_{n}": "x" * 40 for n in range(30)}
            run = messages.RunJob(f"load{number}", size, argv, env, "/", 0, [])
            self.client.get(Named, run, timeout=LONG_S)
        took = time.monotonic() - before.when
        self.quiet()
        return took, self.daemon.cost().cpu - before.cpu

    def rest(self, seconds: float) -> AtRest:
        _, _, around = self.tally()
        before = self.daemon.cost()
        with StatusClock(self.path, STATUS_EVERY_S).running() as clock:
            time.sleep(seconds)
        after = self.daemon.cost()
        seen, lags, machine = self.tally()
        return AtRest(
            seconds=after.when - before.when,
            cores=after.since(before),
            resident=after.resident,
            descriptors=after.descriptors,
            threads=after.threads,
            messages_per_s=2 * (seen.asked + seen.served) / (after.when - before.when),
            heartbeat=Spread.of(seen.round_trips),
            status=Spread.of(clock.seconds),
            status_bytes=clock.bytes,
            around=Around(
                machine.crowd_since(around),
                machine.others_since(around, after.since(before)),
                Spread.of(lags),
            ),
            silences=seen.silences,
        )

    def move(self, count: int, pace: Pace, rest: AtRest) -> Moves:
        """Make ``count`` migrations at once, of capsules drawn from all of them. They are asked for
        one after the other; no host answers the first question of any before all are asked for."""
        chosen = self._chosen(count, "move")
        _, _, around = self.tally()
        self.said("hold")
        before = self.daemon.cost()
        with StatusClock(self.path, STATUS_EVERY_S).running() as clock:
            names = [self._migrate(capsule) for capsule in chosen]
            asked = time.monotonic()
            self.said("go")
            rows = [self._over(name) for name in names]
            after = self.daemon.cost()
        seen, lags, machine = self.tally()
        self.quiet()
        told = self.daemon.cost()
        seconds = after.when - before.when
        done = [row for row in rows if row.state == "done"]
        return Moves(
            asked=len(rows),
            done=len(done),
            at_once=_most_at_once(rows),
            seconds=seconds,
            asking_s=asked - before.when,
            floor=pace.move,
            each=Spread.of([row.seconds for row in rows]),
            frozen=Spread.of([row.frozen_s for row in rows]),
            frozen_floor=pace.frozen,
            cpu_each=(told.cpu - before.cpu - rest.cores * (told.when - before.when))
            / max(1, len(rows)),
            cores=after.since(before),
            messages_per_s=2 * (seen.asked + seen.served) / seconds,
            claims=seen.claims,
            heartbeat=Spread.of(seen.round_trips),
            status=Spread.of(clock.seconds),
            around=Around(
                machine.crowd_since(around),
                machine.others_since(around, after.since(before)),
                Spread.of(lags),
            ),
            silences=seen.silences,
            resident=after.resident,
            errors=sorted({str(row.error) for row in rows if row.error}),
        )

    def restart(self, count: int) -> Restart:
        """Kill the orchestrator in the middle of ``count`` migrations, and start it anew.

        The first is committed by then, the last is not.
        """
        chosen = self._chosen(count, "restart")
        half = len(chosen) // 2
        names = [self._migrate(capsule) for capsule in chosen[:half]]
        self._until(names[0], (MigrationStep.RESTORING.value, MigrationStep.RESUMING.value, *OVER))
        self.said("incomplete")
        names += [self._migrate(capsule) for capsule in chosen[half:]]
        self._until(names[-1], (MigrationStep.FREEZING.value, *OVER))
        self.tally()
        self.daemon.kill()
        self.client.close()
        began = time.monotonic()
        self.daemon.start()
        self.wait_all_up()
        up = time.monotonic() - began
        states = Counter(self._over(name).state for name in names)
        settled = time.monotonic() - began
        self.quiet()
        if lost := len(names) - states["done"] - states["failed"]:
            self.wrong.append(f"after a restart {lost} of {len(names)} capsules are lost")
        return Restart(up, settled, self.daemon.cost().cpu, len(names), states["done"])

    def end_jobs(self) -> tuple[float, float]:
        """SIGTERM to every job: seconds and CPU until all have ended."""
        before = self.daemon.cost()
        for job in self.status().jobs:
            self.client.request(messages.SignalJob(job.name, signal.SIGTERM), timeout=LONG_S)
        eventually(
            lambda: all(job.state == "ended" for job in self.status().jobs),
            "every job's end",
            LONG_S,
        )
        after = self.daemon.cost()
        return after.when - before.when, after.cpu - before.cpu

    def look_for_wrong(self, when: str) -> None:
        """Each capsule runs once, on the host and under the epoch that the orchestrator names."""
        owners = [
            (c.name, c.host, c.epoch)
            for job in self.status().jobs
            for c in job.capsules
            if c.code is None
        ]
        said = self.said("capsules")
        copies = [copy for crowd in said for copy in crowd.capsules]
        twice = [name for name, count in Counter(n for n, _, _ in copies).items() if count > 1]
        odd = set(owners) ^ set(copies)
        held = sum(crowd.held for crowd in said)
        if twice or odd or held:
            self.wrong.append(
                f"{when}: {len(twice)} capsules run twice, {held} are held, and the orchestrator"
                f" and the agents disagree on {sorted(odd)[:4]} … ({len(odd)} rows)"
            )

    def _chosen(self, count: int, why: str) -> list[str]:
        """Capsules drawn from all of them, the same ones in every run."""
        capsules = [c.name for job in self.status().jobs for c in job.capsules]
        return random.Random(why).sample(capsules, min(count, len(capsules)))

    def _migrate(self, capsule: str) -> str:
        ask = messages.Migrate(capsule, "", "load", False)
        return self.client.get(Named, ask, timeout=LONG_S).name

    def _over(self, name: str) -> MigrationRow:
        return self._until(name, OVER)

    def _until(self, name: str, states: Collection[str]) -> MigrationRow:
        found: list[MigrationRow] = []

        def look() -> bool:
            ask = messages.GetMigration(name)
            found[:] = [self.client.get(MigrationDetails, ask, timeout=LONG_S).row]
            return found[0].state in states

        eventually(look, f"{name} to be {' or '.join(states)}", LONG_S, LOOK_S)
        return found[0]


def run(
    hosts: int,
    moves: int = 50,
    rest_s: float = 10.0,
    pace: Pace | None = None,
    under: Sequence[str] = (),
    tell: Tell = lambda _: None,
    keep: Path | None = None,
) -> Run:
    """Everything, with so many hosts; raises LiveshiftError when a phase does not come to an end.

    ``under``: words to start the orchestrator with, instead of Python's; ``tell`` hears of each
    phase; ``keep``: where to leave the orchestrator's log.
    """
    pace = pace or Pace()
    with _scenario(hosts, moves, pace, under, tell, keep) as scene:
        tell("connecting")
        connect_s = scene.connect()
        sizes = clusters.job_sizes(hosts)
        tell(f"starting {len(sizes)} jobs of {sizes[0]} capsules")
        start_s, start_cpu = scene.start_jobs(sizes)
        tell("at rest")
        rest = scene.rest(rest_s)
        scene.look_for_wrong("at rest")
        tell(f"{moves} migrations at once")
        moved = scene.move(moves, pace, rest)
        scene.look_for_wrong("after the migrations")
        tell("killing the orchestrator amid migrations")
        restart = scene.restart(moves)
        scene.look_for_wrong("after a restart")
        tell("ending the jobs")
        end_s, end_cpu = scene.end_jobs()
        scene.client.close()
        scene.daemon.stop()
        return Run(
            hosts,
            sum(sizes),
            len(sizes),
            connect_s,
            start_s,
            start_cpu,
            rest,
            moved,
            restart,
            end_s,
            end_cpu,
            scene.wrong + _unfit(scene.cluster, rest, moved),
        )


@contextmanager
def _scenario(
    hosts: int, moves: int, pace: Pace, under: Sequence[str], tell: Tell, keep: Path | None
) -> Iterator[Scenario]:
    enough_descriptors(8 * hosts + 256)
    with ExitStack() as stack:
        # Short: the path of a UNIX socket has 107 characters at most.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lsload")))
        tell("making keys")
        cluster = clusters.make(directory, hosts, moves)
        daemon = Daemon(directory / "cluster.toml", under)
        if keep is not None:
            stack.callback(lambda: shutil.copy(daemon.log, keep))
        stack.callback(daemon.discard)
        daemon.start()
        socket = cluster.paths.run / "orchestrator.sock"
        eventually(socket.exists, f"the orchestrator's socket\n{daemon.last_words()}", 60)
        names = [host.name for host in cluster.hosts]
        crowds: list[CrowdProcess] = []
        for first in range(0, hosts, PER_PROCESS):
            crowd = CrowdProcess(daemon.config, names[first : first + PER_PROCESS], pace)
            stack.callback(crowd.end)
            crowds.append(crowd)
        yield Scenario(cluster, daemon, crowds)


def _unfit(cluster: Cluster, rest: AtRest, moves: Moves) -> list[str]:
    """What no orchestrator may do with any number of hosts."""
    suspicion = cluster.timeouts.suspicion
    found = [f"a migration failed: {error}" for error in moves.errors]
    if moves.done < moves.asked:
        found.append(f"{moves.asked - moves.done} of {moves.asked} migrations did not end well")
    for when, heartbeat in (("at rest", rest.heartbeat), ("while moving", moves.heartbeat)):
        if heartbeat.p99 >= suspicion:
            found.append(
                f"{when} a heartbeat's answer took {heartbeat.p99:.1f} s (p99): hosts look lost"
            )
    silent = rest.silences + moves.silences
    if silent:
        found.append(f"the orchestrator left {silent} asks without an answer in time")
    return found


def _most_at_once(rows: Sequence[MigrationRow]) -> int:
    """How many were under way together."""
    edges = [(row.asked, 1) for row in rows] + [(row.asked + row.seconds, -1) for row in rows]
    now = most = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return most
