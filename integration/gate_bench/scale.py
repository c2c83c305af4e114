# SPDX-License-Identifier: Apache-2.0
"""How long a boundary takes to find for jobs larger than the machine: 64 to 16,384 ranks.

Real are the orchestrator's side (gates.Attempt with its CollectiveClock) and every message, encoded
and decoded in both directions; simulated are hosts of eight ranks each, which run a program of
tensor, pipeline and data parallelism by the gate's rule, and the way to them. Everything runs in
one process on one core; ``hosts_cpu_s`` is the hosts' part of it, which a cluster has elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from typing import Any

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.runtime import messages
from liveshift.runtime.config.timeouts import Timeouts
from liveshift.runtime.messages import Member, Message, frames
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.quiesce.gates import Attempt, Boundary

SIZES = (64, 1024, 16384)
GOAL_S = 1.0
TENSOR = 8  # ranks of a tensor-parallel group: one host
PIPELINE = 8
MICROBATCHES = 8
STEPS = 100  # that all ranks have done
SKEW = 0.6  # of a step, between the first rank and the last
WAY_S = (0.0002, 0.0015)  # there and back, and until the agent looks

_MASK = (1 << 64) - 1


def _id(*parts: int) -> int:
    """A number of 64 bits, as a communicator's identity is."""
    value = 0
    for part in parts:
        value = (value * 6364136223846793005 + (part + 2) * 1442695040888963407) & _MASK
    return value ^ value >> 29 or 1


WORLD = _id(0)


class Rank:
    """One rank: the sequence of clocks that a step takes, and how far it is."""

    def __init__(self, rank: int, tensor: int, stage: int, data: int, into: float) -> None:
        tp, dp, pp = _id(1, stage, data), _id(2, tensor, stage), _id(3, tensor, data)
        self.rank = rank
        self.communicators = {
            WORLD: ("world", rank),
            tp: ("tp", tensor),
            dp: ("dp", data),
            pp: ("pp", stage),
        }
        self.pairs: dict[int, tuple[int, int, int]] = {}
        forward, backward = [], []
        if stage > 0:
            forward.append(self._pair(pp, stage - 1, stage))
        forward += [tp, tp]
        if stage < PIPELINE - 1:
            forward.append(self._pair(pp, stage, stage + 1))
            backward.append(self._pair(pp, stage + 1, stage))
        backward += [tp, tp]
        if stage > 0:
            backward.append(self._pair(pp, stage, stage - 1))
        self.step = forward * MICROBATCHES + backward * MICROBATCHES + [dp, WORLD]
        self.next = int(into * len(self.step))
        self.numbers = {clock: STEPS * count for clock, count in Counter(self.step).items()}
        for clock in self.step[: self.next]:
            self.numbers[clock] += 1
        self.numbers.setdefault(pp, 0)

    def _pair(self, pp: int, sender: int, receiver: int) -> int:
        clock = _id(pp, sender, receiver)
        self.pairs[clock] = (pp, sender, receiver)
        return clock

    def run(self, targets: dict[int, int]) -> set[int]:
        """To its targets; returns clocks of which it had to pass beyond one."""
        numbers = self.numbers
        pending = sum(max(0, targets[clock] - number) for clock, number in numbers.items())
        while pending:
            clock = self.step[self.next]
            self.next = (self.next + 1) % len(self.step)
            numbers[clock] += 1
            pending -= numbers[clock] <= targets[clock]
        return {clock for clock, number in numbers.items() if number > targets[clock]}


class Host:
    """Eight ranks and their agent; by message what gate_handlers.py answers."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.targets: dict[int, int] = {}
        self.beyond: list[set[int]] = [set() for _ in ranks]
        self.version = 0

    def __call__(self, ask: Message) -> Message | None:
        match ask:
            case messages.Arm():
                return self._armed()
            case messages.SetTargets():
                if ask.version > self.version:
                    self.version = ask.version
                    changed = dict(ask.targets.items() - self.targets.items())
                    self.targets |= changed
                    for n, rank in enumerate(self.ranks):
                        if not rank.numbers.keys().isdisjoint(changed):
                            self.beyond[n] = rank.run(self.targets)
                return self._look()
            case messages.Shut():
                return self._look()
        raise AssertionError(f"nobody asks {ask}")

    def _armed(self) -> messages.Armed:
        numbers: dict[int, int] = {}
        pairs: dict[int, tuple[int, int, int]] = {}
        members = []
        for rank in self.ranks:
            for clock, number in rank.numbers.items():
                numbers[clock] = max(number, numbers.get(clock, 0))
            pairs |= rank.pairs
            for n, (id_, (name, place)) in enumerate(rank.communicators.items()):
                members.append(Member(id_, "gloo", name, 8, place, rank.rank, n + 1))
        return messages.Armed(numbers, members, len(self.ranks), [], pairs)

    def _look(self) -> messages.TargetsSet:
        raised: dict[int, int] = {}
        for rank, clocks in zip(self.ranks, self.beyond, strict=True):
            for clock in clocks:
                raised[clock] = max(rank.numbers[clock], raised.get(clock, 0))
        return messages.TargetsSet(self.version, not raised, raised, [])


class Wire:
    """Carries messages as bytes, and counts them."""

    def __init__(self, hosts: dict[str, Host], rng: random.Random) -> None:
        self.hosts, self.rng = hosts, rng
        self.kinds: Counter[str] = Counter()
        self.bytes = 0
        self.hosts_cpu_s = 0.0

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None:
        raw = frames.encode_request(1, message)
        await asyncio.sleep(self.rng.uniform(*WAY_S))
        began = time.thread_time()
        heard = frames.decode(raw).body
        assert heard is not None
        answer = frames.encode_answer(1, self.hosts[host](heard))
        self.hosts_cpu_s += time.thread_time() - began
        self.kinds[type(message).__name__] += 2
        self.bytes += len(raw) + len(answer)
        return frames.decode(answer).answer


def cluster(ranks: int, rng: random.Random) -> dict[str, Host]:
    """Hosts of a job somewhere in one step, no two ranks equally far."""
    hosts = {}
    for number in range(ranks // TENSOR):
        data, stage = divmod(number, PIPELINE)
        hosts[f"h{number:04}"] = Host(
            [Rank(number * TENSOR + t, t, stage, data, rng.uniform(0, SKEW)) for t in range(TENSOR)]
        )
    return hosts


def run(ranks: int, seed: int = 1) -> dict[str, Any]:
    """One boundary; raises AssertionError where it is none."""
    rng = random.Random(seed)
    hosts = cluster(ranks, rng)
    wire = Wire(hosts, rng)
    asked = messages.RunJob("large", ranks, ["train"], {}, "/", 0, [])
    capsules = {name: Capsule(name, n, name, 1) for n, name in enumerate(hosts)}
    job = Job("large", Overlay(1, "10.99.0.0/24"), asked, 0, 0.0, capsules)
    gc.collect()
    gc.freeze()  # the hosts' memory is none of the orchestrator's
    attempt = Attempt(wire.ask, job, 1, Timeouts(quiesce=120.0))
    began, cpu = time.monotonic(), time.process_time()
    boundary: Boundary = asyncio.run(attempt.run())
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    gc.unfreeze()
    for host in hosts.values():
        for rank in host.ranks:
            for clock, number in rank.numbers.items():
                assert boundary.numbers[clock] == number, "half begun"
    return {
        "ranks": ranks,
        "hosts": len(hosts),
        "clocks": len(boundary.numbers),
        "seconds": round(seconds, 4),
        "orchestrator_cpu_s": round(cpu - wire.hosts_cpu_s, 4),
        "hosts_cpu_s": round(wire.hosts_cpu_s, 4),
        "messages": sum(wire.kinds.values()),
        "messages_per_rank": round(sum(wire.kinds.values()) / ranks, 3),
        "aims_per_host": round(wire.kinds["SetTargets"] / 2 / len(hosts), 2),
        "bytes": wire.bytes,
    }


def measure(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """``quiesce_scale``: a row per number of ranks."""
    return {"goal_quiesce_s": GOAL_S, "quiesce_scale": [run(size) for size in sizes]}
