# SPDX-License-Identifier: Apache-2.0
"""A worker process of a step: told a line of JSON, answers a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from liveshift.waiting import readable


class WorkerFailed(Exception):
    """A worker ended or was silent; with what it had to say."""


class Child:
    """``gpu_suite.workers.<kind>`` (or a module named with dots); a context: it is killed at the
    end."""

    def __init__(
        self, kind: str, *args: object, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        module = kind if "." in kind else f"gpu_suite.workers.{kind}"
        self._log = log / f"{kind}-{time.monotonic_ns()}"
        with self._log.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, args)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=os.environ | (env or {}),
            )
        self.pid = self._process.pid
        self._read = b""

    def say(self, what: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as broken:
            raise WorkerFailed(f"{self.kind} has ended: {self._said()}") from broken

    def answer(self, deadline_s: float) -> Any:
        """The next line; raises WorkerFailed after the deadline, or when it has ended."""
        assert self._process.stdout is not None
        until = time.monotonic() + deadline_s
        while b"\n" not in self._read:
            left = until - time.monotonic()
            if left <= 0 or not readable(left, self._process.stdout):
                raise WorkerFailed(f"{self.kind} was silent for {deadline_s:.0f} s: {self._said()}")
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                code = self._process.wait()
                raise WorkerFailed(f"{self.kind} ended with {code}: {self._said()}")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def ask(self, what: Any, deadline_s: float) -> Any:
        self.say(what)
        return self.answer(deadline_s)

    def _said(self) -> str:
        return " ".join(self._log.read_text(errors="replace").split())[-400:]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.end()
