# SPDX-License-Identifier: Apache-2.0
"""A daemon starts itself again when its cluster file changes, and only when that is right."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from liveshift.runtime.config.cluster import Cluster, load
from liveshift.runtime.daemon import cluster_file
from liveshift.runtime.daemon.cluster_file import ClusterFile

TEXT = """\
[cluster]
name = "c"
orchestrator = "127.0.0.1:7400"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "127.0.0.2"
"""
MORE = TEXT + '[hosts.h1]\naddress = "127.0.0.3"\n'


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cluster_file, "POLL_S", 0.01)
    found = tmp_path / "cluster.toml"
    found.write_text(TEXT)
    return found


def followed(
    path: Path,
    change: Callable[[], object],
    *,
    idle: Callable[[], bool] = lambda: True,
    objection: Callable[[Cluster], str] = lambda _: "",
    seconds: float = 5.0,
) -> bool:
    """Change the file under a daemon that runs; whether the daemon was ended to start again."""

    async def run() -> bool:
        ended = asyncio.Event()

        async def daemon() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        file = ClusterFile(path, load(path))
        asyncio.get_running_loop().call_later(0.05, change)
        try:
            await asyncio.wait_for(file.follow(daemon(), idle, objection), seconds)
        except TimeoutError:
            return False
        assert ended.is_set()
        return True

    return asyncio.run(run())


def test_a_new_host_makes_the_daemon_start_again(path: Path) -> None:
    assert followed(path, lambda: path.write_text(MORE) and None)


def test_a_comment_does_not(path: Path) -> None:
    assert not followed(path, lambda: path.write_text(TEXT + "# nothing\n") and None, seconds=0.3)


def test_it_waits_until_no_move_is_under_way(path: Path) -> None:
    asked: list[bool] = []

    def idle() -> bool:
        asked.append(len(asked) >= 5)
        return asked[-1]

    assert followed(path, lambda: path.write_text(MORE) and None, idle=idle)
    assert asked == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (MORE.replace("127.0.0.3", "nonsense"), "nonsense"),
        (MORE.replace("10.99", "10.98"), "cluster.overlay differs"),
        (MORE + '[paths]\nrun = "/run/other"\n', "paths differs"),
        (MORE.replace("7400", "7500"), "cluster.orchestrator differs"),
    ],
)
def test_what_cannot_be_used_changes_nothing_and_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    with caplog.at_level(logging.ERROR, "liveshift.cluster_file"):
        assert not followed(path, lambda: path.write_text(text) and None, seconds=0.4)
    assert why in caplog.text
    assert "not used" in caplog.text


def test_a_sound_file_after_a_wrong_one_is_used(path: Path) -> None:
    def change() -> None:
        path.write_text("nonsense")
        asyncio.get_running_loop().call_later(0.1, path.write_text, MORE)

    assert followed(path, change)


def test_the_daemon_may_object(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change = lambda: path.write_text(MORE) and None  # noqa: E731
    assert not followed(path, change, objection=lambda _: "h7 runs gpt/0", seconds=0.3)
    assert "h7 runs gpt/0" in caplog.text


def test_the_daemon_may_object_to_a_file_that_has_waited_for_a_move(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile a job has started on a host that was taken out: the daemon could not start again.
    The daemon is asked in its own thread, since what it looks at changes there."""
    looks: list[bool] = []
    threads: list[threading.Thread] = []

    def idle() -> bool:
        looks.append(len(looks) >= 5)
        return looks[-1]

    def objection(_: Cluster) -> str:
        threads.append(threading.current_thread())
        return "h7 runs gpt/0" if looks else ""

    change = lambda: path.write_text(MORE) and None  # noqa: E731
    assert not followed(path, change, idle=idle, objection=objection, seconds=0.5)
    assert "not used: h7 runs gpt/0" in caplog.text
    assert looks == [False] * 5 + [True], "it is not looked at again"
    assert threads == [threading.main_thread()] * 2


def test_what_the_daemon_raises_is_raised(path: Path) -> None:
    async def daemon() -> None:
        raise ZeroDivisionError

    file = ClusterFile(path, load(path))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(file.follow(daemon(), lambda: True, lambda _: ""))


def test_it_keeps_its_pid_and_command_line_and_no_descriptor(tmp_path: Path) -> None:
    """exec(2), so that systemd and the lab see the same process; nothing open is handed on."""
    script = tmp_path / "again.py"
    script.write_text(
        "import os, sys\n"
        "from liveshift.runtime.daemon.cluster_file import start_again\n"
        "print(os.getpid(), sys.argv[1:], sorted(os.listdir('/proc/self/fd'))[:4], flush=True)\n"
        "if 'AGAIN' not in os.environ:\n"
        "    os.environ['AGAIN'] = '1'\n"
        "    os.set_inheritable(os.open('/dev/null', os.O_RDONLY), True)\n"
        "    start_again()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), "--config", "x y"],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "AGAIN"},
    )
    first, second = done.stdout.splitlines()
    assert first == second
    assert "['--config', 'x y']" in first
