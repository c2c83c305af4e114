# SPDX-License-Identifier: Apache-2.0
"""A process that is told one expression a line, and answers each with a line.

Standard library only: what imports it may be started without site-packages.
"""

from __future__ import annotations

import subprocess


class ToldProcess:
    """The test's end; ``process`` reads from a pipe and writes to one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._orders, self._answers = process.stdin, process.stdout
        self.pid = process.pid

    def begin(self, expression: str) -> None:
        self._orders.write(expression.encode() + b"\n")
        self._orders.flush()

    def line(self) -> str:
        """Its next answer as it stands."""
        said = self._answers.readline().decode()
        assert said, f"it ended with {self.wait()}"
        return said

    def wait(self) -> int:
        return self._process.wait(timeout=20)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._orders.close()
        self._answers.close()
