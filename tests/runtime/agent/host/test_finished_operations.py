# SPDX-License-Identifier: Apache-2.0
"""Heartbeats count the operations of living processes, whatever else lies in their directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_bytes import page_bytes

from liveshift.criu_glue.capsule import sandboxes
from liveshift.interposer.page import PageFile
from liveshift.runtime.agent.host.finished_operations import finished_by_pid


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_only_living_processes_count(
    child: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = tmp_path / sandboxes.PAGES.lstrip("/")
    pages.mkdir(parents=True)
    sandbox: Any = SimpleNamespace(root=tmp_path, init=os.getpid())
    assert finished_by_pid(sandbox) == {}
    (pages / str(child)).write_bytes(page_bytes(pid=child, clocks=((9, 8),)))
    ended = os.getpid()  # not below process 1 of this capsule, which it stands for itself
    (pages / str(ended)).write_bytes(page_bytes(pid=ended, clocks=((99, 99),)))
    for pid in range(1, 50):
        if pid not in (child, ended):
            os.link(pages / str(ended), pages / str(pid))
    opened: list[str] = []
    real = PageFile.__init__

    def init(self: PageFile, fd: int, path: Path) -> None:
        opened.append(path.name)
        real(self, fd, path)

    monkeypatch.setattr(PageFile, "__init__", init)
    assert finished_by_pid(sandbox) == {child: 8}
    assert opened == [str(child)]
    assert finished_by_pid(sandbox, {child, 1}) == {child: 8}
