# SPDX-License-Identifier: Apache-2.0
"""Runs one target in this process: with atheris where it is installed, else with mutations.

The last line on stdout is the result, as JSON. An input that breaks a rule is written to the
findings directory, and the run ends there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz import guard
from fuzz.mutation import mutated
from fuzz.target import Target

if TYPE_CHECKING:
    from fuzz.target import Target  # atheris has to be there before it


@dataclass
class Result:
    target: str
    executions: int
    seconds: float
    findings: list[str]

    def say(self) -> None:
        print(json.dumps(asdict(self)), flush=True)


def with_mutations(target: Target, runs: int, seconds: float, seed: int, findings: Path) -> Result:
    """``runs`` inputs, or as many as fit into ``seconds``; 0 is no limit."""
    rng = random.Random(seed)
    corpus = target.corpus()
    run = guard.timed(target.run)
    guard.limit_memory()
    began, done = time.monotonic(), 0
    result = Result(target.name, 0, 0.0, [])
    for data in corpus:
        if not _one(run, data, target, findings, result):
            break
        done += 1
    while not result.findings and (not runs or done < runs):
        if seconds and time.monotonic() - began > seconds:
            break
        if not _one(run, mutated(rng, corpus, target.largest), target, findings, result):
            break
        done += 1
    result.executions, result.seconds = done, time.monotonic() - began
    return result


def _one(
    run: Callable[[bytes], None], data: bytes, target: Target, findings: Path, result: Result
) -> bool:
    try:
        run(data)
    except BaseException as broken:
        if isinstance(broken, KeyboardInterrupt):
            raise
        result.findings.append(str(_keep(target, data, findings)))
        traceback.print_exc(file=sys.stderr)
        return False
    return True


def _keep(target: Target, data: bytes, findings: Path) -> Path:
    path = findings / target.name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def with_atheris(target: Target, runs: int, seconds: float, seed: int, findings: Path) -> None:
    """Never returns: libFuzzer ends the process, saying "Done N runs in M second(s)"."""
    import atheris

    run = guard.timed(target.run)
    result = Result(target.name, 0, 0.0, [])
    began = time.monotonic()

    def one(data: bytes) -> None:
        result.executions += 1
        if not _one(run, data, target, findings, result):
            result.seconds = time.monotonic() - began
            result.say()
            os._exit(1)

    corpus = Path(tempfile.mkdtemp(prefix="corpus-", dir=os.environ["TMPDIR"]))
    for n, data in enumerate(target.corpus()):
        (corpus / f"{n:04}").write_bytes(data)
    findings.mkdir(parents=True, exist_ok=True)
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-max_len={target.largest}",
        f"-seed={seed}",
        "-timeout=30",
        "-rss_limit_mb=3000",
        f"-artifact_prefix={findings}/libfuzzer-{target.name}-",
    ]
    arguments += [f"-runs={runs}"] if runs else []
    arguments += [f"-max_total_time={math.ceil(seconds)}"] if seconds else []
    atheris.Setup(arguments, one)
    guard.limit_memory()
    atheris.Fuzz()
