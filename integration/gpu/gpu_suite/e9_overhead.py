# SPDX-License-Identifier: Apache-2.0
"""E9: what the interposer costs on an open gate: all-reduces of 1 KiB to 1 GiB, and training steps.

The same processes several times at once, of which one runs at a time, in turns of random order:
without the interposer, without it once more (what two of the same differ by is chance), with it,
and with its allocator too. Figures are medians of the ratios of neighbouring turns. On an H100 two
processes of the same kind differed by 4 % in all their training steps, so there are several of each
kind, which take turns.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain, cycle

from liveshift.interposer import page, page_directory
from liveshift.interposer.layout import MemoryKind
from liveshift.interposer.library import library_path

from .child import Child
from .step import GIB, MIB, Step

WITHOUT, CHANCE, GATE, ARENA = "without", "chance", "gate", "arena"
VARIANTS = (WITHOUT, CHANCE, GATE, ARENA)
RANKS = 2
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
}
TURN_S = 0.04
"""About as long as a turn should last, so that clocks and wake-ups do not show."""
EACH = 3
"""Processes of each kind that train, if the GPU holds so many."""
TRAINS_BYTES = 4 * GIB
"""At most so much device memory takes a process that trains."""
SIZE_S = 4.0
"""About as long as all turns of one size may last, where that leaves three of each."""


def measure(step: Step) -> None:
    step.begin()
    with step.part("all-reduce"):
        _reduces(step)
    with step.part("training step"):
        _training(step)


def _environment(step: Step, variant: str, what: str) -> dict[str, str]:
    if variant in (WITHOUT, CHANCE):
        return dict(NCCL)
    pages = step.work / f"pages-{what}-{variant}"
    pages.mkdir(exist_ok=True)
    arena = {"LIVESHIFT_DEVICE_ARENA": "1"} if variant == ARENA else {}
    return {**NCCL, "LD_PRELOAD": str(library_path()), "LIVESHIFT_PAGES": str(pages), **arena}


def _seen(step: Step, what: str, variant: str, at_least: int) -> None:
    """The interposer must have been there, and its allocator where it should, or the ratio is one
    of nothing."""
    paths = page_directory.paths(step.work / f"pages-{what}-{variant}")
    step.check(bool(paths), f"{what}, {variant}: the interposer was not there")
    for path in paths:
        with page.opened(path) as opened:
            count = opened.page().begun.get("nccl.AllReduce", 0)
            kinds = {row.kind for row in opened.allocations()}
        step.check(
            count >= at_least,
            f"{what}, {variant}: the interposer saw {count} all-reduces, not {at_least}",
        )
        step.check(
            (MemoryKind.ARENA in kinds) == (variant == ARENA),
            f"{what}, {variant}: the memory is of the kinds {sorted(kinds)}",
        )
        step.figure(f"{what}/{variant}, all-reduces seen", count)


class Pair:
    """Two ranks with a communicator of theirs, and one of rank 0 alone."""

    def __init__(self, ranks: list[Child]) -> None:
        self._ranks = ranks
        for rank in ranks:
            rank.answer(60)
        for name, count in (("both", RANKS), ("alone", 1)):
            chosen = ranks[0].ask(["id"], 30)
            for index, rank in enumerate(ranks[:count]):
                rank.say(["join", name, chosen, index, count])
            for rank in ranks[:count]:
                rank.answer(60)

    def reduce(self, name: str, size: int, times: int) -> float:
        """Seconds of one, of the slower rank."""
        asked = self._ranks if name == "both" else self._ranks[:1]
        for rank in asked:
            rank.say(["reduce", name, size, times])
        return float(max(rank.answer(60) for rank in asked) / times)


def _reduces(step: Step) -> None:
    largest = 4 * MIB if step.simulated else GIB
    sizes = [size for size in (1 << 10, 32 << 10, MIB, 32 * MIB, GIB) if size <= largest]
    with ExitStack() as stack:
        pairs = {}
        for variant in (WITHOUT, CHANCE, GATE):
            ranks = []
            for rank in range(RANKS):
                environment = _environment(step, variant, "all-reduce")
                environment["NCCL_HOSTID"] = f"suite-{rank}"  # two ranks on one GPU, by sockets
                child = Child("reduce", largest, log=step.work, env=environment)
                ranks.append(stack.enter_context(child))
            pairs[variant] = Pair(ranks)
        made = 0
        for name, size in (("alone", 1 << 10), *(("both", size) for size in sizes)):
            once = min(pair.reduce(name, size, 2) for pair in pairs.values())
            times = max(1, min(400, round(TURN_S / once)))
            turns = 5 if step.short else max(3, min(25, round(SIZE_S / (3 * once * times))))
            took = _turns(
                {v: _reducing(pair, name, size, times) for v, pair in pairs.items()}, turns
            )
            where = f"all-reduce/{_size(size)}" + (", one rank" if name == "alone" else "")
            step.figure(f"{where}/microseconds", statistics.median(took[WITHOUT]) * 1e6)
            for variant in (CHANCE, GATE):
                step.figure(f"{where}/{variant}_ratio", _ratio(took, variant))
            made += (2 + times * turns) * (name == "both")
    _seen(step, "all-reduce", GATE, made)


def _reducing(pair: Pair, name: str, size: int, times: int) -> Callable[[], float]:
    return lambda: pair.reduce(name, size, times)


def _training(step: Step) -> None:
    how = "torch" if step.machine.torch_cuda else "runtime"
    step.figure("training step/by", "torch" if how == "torch" else "copies and all-reduces alone")
    turns = 6 if step.short else 60
    fit = step.machine.gpu_free_bytes // (len(VARIANTS) * TRAINS_BYTES)
    each = 1 if step.short else max(1, min(EACH, fit))
    step.figure("training step/processes of each kind", each)
    with ExitStack() as stack:
        children: dict[str, list[Child]] = {}
        for variant in VARIANTS:
            environment = _environment(step, variant, "training step")
            children[variant] = [
                stack.enter_context(Child("training", how, log=step.work, env=environment))
                for _ in range(each)
            ]
        for child in chain.from_iterable(children.values()):
            child.answer(120)
        once = children[WITHOUT][0].ask(5, 60) / 5
        steps = max(2, round(4 * TURN_S / once))
        took = _turns({v: _stepping(alike, steps) for v, alike in children.items()}, turns)
    step.figure("training step/milliseconds", statistics.median(took[WITHOUT]) * 1e3)
    for variant in (CHANCE, GATE, ARENA):
        step.figure(f"training step/{variant}_ratio", _ratio(took, variant))
    for variant in (GATE, ARENA):
        _seen(step, "training step", variant, turns // each * steps)


def _stepping(alike: list[Child], steps: int) -> Callable[[], float]:
    """A function that lets the next of these processes train: seconds of a step."""
    order = cycle(alike)
    return lambda: float(next(order).ask(steps, 60) / steps)


def _turns(work: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Seconds by variant, one of each turn."""
    took: dict[str, list[float]] = {name: [] for name in work}
    order = list(work)
    for _ in range(turns):
        random.shuffle(order)
        for name in order:
            took[name].append(work[name]())
    return took


def _ratio(took: dict[str, list[float]], variant: str) -> float:
    return statistics.median(
        one / without for one, without in zip(took[variant], took[WITHOUT], strict=True)
    )


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size >> 10} KiB"
