# SPDX-License-Identifier: Apache-2.0
"""Processes full of simulated agents, each agent with a CURVE socket of its own.

    python -m load.crowd CLUSTER_FILE PACE h0 h1 …

takes one word a line on stdin and answers each with a line of JSON (:class:`Said`): ``tally``
says what was seen since the last one, ``capsules`` what runs where; after ``incomplete`` a freeze
that begins lasts until its image is closed; between ``hold`` and ``go`` no host answers a
migration's first question. It ends with stdin.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

import msgspec
import zmq
import zmq.asyncio

from liveshift.errors import LiveshiftError
from liveshift.runtime.config.cluster import Cluster, load

from .agent import Pace, SimulatedAgent, Tally

PER_PROCESS = 250
LAG_LOOK_S = 0.05
GREETINGS_PER_S = 500


class Said(msgspec.Struct):
    """``capsules``: those that run, as [name, host, epoch]; ``held``: copies that do not.
    ``lags``: by how much this process itself was late, in seconds; ``cpu`` its CPU seconds."""

    tally: Tally
    lags: list[float]
    cpu: float
    capsules: list[tuple[str, str, int]]
    held: int


class Crowd:
    """The simulated agents of one process."""

    def __init__(self, cluster: Cluster, hosts: Sequence[str], pace: Pace) -> None:
        self._cluster = cluster
        self._tally = Tally()
        self._lags: list[float] = []
        # A context has threads of its own: with one for each agent, switching between them would
        # cost more than what they do.
        shared = zmq.asyncio.Context()
        shared.set(zmq.MAX_SOCKETS, 4 * len(hosts) + 64)
        with mock.patch.object(zmq.asyncio, "Context", return_value=shared):
            self.agents = [
                SimulatedAgent(cluster, host, pace, lambda: self._tally) for host in hosts
            ]

    async def run(self) -> None:
        """Connect all agents and serve until stdin ends."""
        tasks = [asyncio.create_task(self._look_at_lag())]
        chance = random.Random(self.agents[0].host)
        heartbeat = self._cluster.timeouts.heartbeat
        for count, agent in enumerate(self.agents):
            tasks.append(asyncio.create_task(agent.uplink.serve()))
            # Real agents start when they start; together they would beat together for ever.
            after = count / GREETINGS_PER_S + chance.random() * heartbeat
            tasks.append(asyncio.create_task(agent.report(after)))
            tasks.append(asyncio.create_task(agent.keep_asking()))
        try:
            await self._answer()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_at_lag(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LAG_LOOK_S)
            self._lags.append(time.monotonic() - began - LAG_LOOK_S)

    async def _answer(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while word := (await reader.readline()).decode().strip():
            tally, lags = self._tally, self._lags
            if word == "tally":
                self._tally, self._lags = Tally(), []
            if word == "incomplete":
                for agent in self.agents:
                    agent.completes = False
            if word == "hold":
                for agent in self.agents:
                    agent.may_answer.clear()
            if word == "go":
                for agent in self.agents:
                    agent.may_answer.set()
            said = Said(
                tally,
                lags,
                sum(os.times()[:2]),
                [(n, a.host, e) for a in self.agents for n, e in a.capsules.items()]
                if word == "capsules"
                else [],
                sum(len(agent.leaving) + len(agent.coming) for agent in self.agents),
            )
            sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
            sys.stdout.buffer.flush()


class CrowdProcess:
    """A crowd in a process of its own, as the harness holds it."""

    def __init__(self, config: Path, hosts: Sequence[str], pace: Pace) -> None:
        words = ["-m", "load.crowd", str(config), msgspec.json.encode(pace).decode(), *hosts]
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # as this process
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, word: str) -> None:
        """Ask without waiting; :meth:`hear` has the answer. Raises LiveshiftError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def hear(self) -> Said:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return msgspec.json.decode(line, type=Said)

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> LiveshiftError:
        return LiveshiftError(f"simulated agents have ended with code {self._process.wait()}")


def main() -> None:
    file, pace, *hosts = sys.argv[1:]
    asyncio.run(Crowd(load(file), hosts, msgspec.json.decode(pace, type=Pace)).run())


if __name__ == "__main__":
    main()
