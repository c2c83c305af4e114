# SPDX-License-Identifier: Apache-2.0
"""A job in the foreground is like a command in the foreground: output, signals, exit code.

What it prints comes through whole, on the stream it was written to, also while it moves.
"""

from __future__ import annotations

import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from lab_session import JOBS, LabSession, NewLab, eventually
from moving_job import Job
from phases import phase

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

MIB = 1 << 20
NUMBERS = ("python", str(JOBS / "numbered_lines.py"))


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab(
        "--hosts", "3", "--timeouts", "grace=3", "--logs", "max=1MiB", "--logs", "keep=3"
    )


def numbered(text: str, word: str, capsule: str, prefix: str) -> list[int]:
    """The numbers of a capsule's lines; every line must be whole and nobody else's."""
    found = []
    for line in text.splitlines():
        if not line.startswith(prefix) or line.endswith(f"{capsule} got SIGINT"):
            continue
        match = re.fullmatch(rf"{word} (\d+)( x*)?\.", line.removeprefix(prefix))
        assert match, f"a line of {capsule} is not what it printed: {line!r}"
        number = int(match[1])
        if word == "out":
            assert (match[2] or "") == " " + "x" * (number % 97)
        found.append(number)
    return found


def grown(file: Path, size: int) -> bool:
    return file.stat().st_size > size


def test_output_of_two_capsules_while_both_move(lab: LabSession, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    run = ("run", "--nnodes", "2", "--name", "talk", "--", *NUMBERS, "--polite")
    with out.open("wb") as to_out, err.open("wb") as to_err:
        running = lab.popen(*run, stdout=to_out, stderr=to_err)
    try:
        eventually(lambda: out.read_text().count("talk/1: out 99 "), "a hundred lines", 20)
        job = Job(lab, "talk", NUMBERS, 2, tmp_path)
        follow_to = (tmp_path / "follow").open("wb")
        follow = lab.popen("logs", "talk", "-f", stdout=follow_to, stderr=subprocess.DEVNULL)
        try:
            for index in (1, 0):
                job.migrate(index)
                wanted = out.stat().st_size + 5000
                eventually(partial(grown, out, wanted), "output to go on", 20)
            running.send_signal(signal.SIGINT)
            assert running.wait(20) == 40 + signal.SIGINT
            assert follow.wait(20) == 0
        finally:
            follow.kill()
            follow_to.close()
    finally:
        running.kill()
        running.wait()

    logs = lab.cli("logs", "talk")
    followed = (tmp_path / "follow").read_text()
    for index in (0, 1):
        capsule = f"talk/{index}"
        told = [line for line in out.read_text().splitlines() if "got SIG" in line]
        assert f"{capsule}: {capsule} got SIGINT" in told, "Ctrl-C reaches every capsule"
        alone = lab.cli("logs", capsule)
        for word, relayed, logged, of_one in (
            ("out", out.read_text(), logs.out, alone.out),
            ("err", err.read_text(), logs.err, alone.err),
        ):
            expected = None
            for where, text, prefix in (
                ("run", relayed, f"{capsule}: {word}"),
                ("logs of the job", logged, f"{capsule}: {word}"),
                ("logs of the capsule", of_one, word),
            ):
                numbers = numbered(text, word, capsule, prefix.removesuffix(word))
                assert numbers == list(range(len(numbers))), f"{where}: lost, doubled or mixed up"
                assert len(numbers) > 200
                expected = expected or len(numbers)
                assert len(numbers) == expected, f"{where} has fewer lines than the others"
        assert followed.count(f"{capsule}: out ") == logs.out.count(f"{capsule}: out ")


MUCH = """
import os, time
n = 0
while True:
    os.write(1, b"".join(b"%09d\\n" % i for i in range(n, n + 1000)))
    n += 1000
    time.sleep(0.004)
"""
"""Prints up to 2.5 MB/s in numbered lines."""


def test_much_output_moves_bounded_and_says_what_is_missing(
    lab: LabSession, tmp_path: Path
) -> None:
    """Old output goes; a reader's place in the rest stays good over a move."""
    job = lab.start("much", ("python", "-Sc", MUCH))
    followed = tmp_path / "followed"
    with followed.open("wb") as to:
        follow = lab.popen("logs", "-f", "much/0", stdout=to, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: followed.stat().st_size > 5 << 20, "5 MB of output", 60)
        row = job.migrate(0)
        assert (phase(row, "files ahead").bytes or 0) < 4.5 * MIB, "no more than is kept went over"
        before = int(lines(followed)[-1])
        eventually(lambda: int(lines(followed)[-1]) > before + 500_000, "5 MB more", 60)
        lab.cli("stop", "much")
        assert follow.wait(20) == 0
    finally:
        follow.kill()
        follow.wait()
    numbers = list(map(int, lines(followed)))
    assert numbers == sorted(set(numbers)), "no line doubled, and none out of its order"
    last = lab.cli("logs", "much/0")
    kept = list(map(int, last.out.split()))
    assert kept == list(range(kept[0], kept[0] + len(kept)))
    assert kept[-1] == numbers[-1]
    assert len(last.out) <= 3.1 * MIB
    missing = re.match(r"\[liveshift: (\d+) bytes of the output of much/0 are missing", last.err)
    assert missing is not None
    assert int(missing[1]) >= 10 * kept[0], "its lines, and their records' headers"


def lines(file: Path) -> list[bytes]:
    """The whole ones."""
    return file.read_bytes().split(b"\n")[:-1]


def test_exit_code_is_the_jobs(lab: LabSession) -> None:
    lines = ("--lines", "20", "--pace", "0.001")
    said = lab.cli("run", "--name", "three", "--", *NUMBERS, *lines, "--code", "3", code=3)
    assert numbered(said.out, "out", "three/0", "") == list(range(20))
    assert numbered(said.err, "err", "three/0", "") == list(range(20))
    assert lab.cli("run", "--", *NUMBERS, *lines).code == 0


def test_exit_code_after_a_signal(lab: LabSession) -> None:
    words = (*NUMBERS, "--lines", "3", "--die", str(int(signal.SIGKILL)))
    said = lab.cli("run", "--name", "shot", "--", *words, code=128 + signal.SIGKILL)
    assert "out 2" in said.out


def test_exit_code_of_what_cannot_be_run(lab: LabSession) -> None:
    said = lab.cli("run", "--", "/nonexistent/train", code=127)
    assert "cannot run /nonexistent/train" in said.err
    assert lab.cli("run", "--", "/etc", code=126).code == 126


def test_the_first_capsule_to_fail_gives_the_code(lab: LabSession) -> None:
    script = 'if [ "$RANK" = 1 ]; then exit 7; else exec sleep 60; fi'
    lab.cli("run", "--nnodes", "2", "--name", "half", "--", "sh", "-c", script, code=7)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(lab: LabSession, signum: signal.Signals) -> None:
    running = lab.popen("run", "--name", "polite", "--", *NUMBERS, "--polite")
    try:
        assert running.stdout is not None
        assert running.stdout.readline().startswith(b"out 0")
        running.send_signal(signum)
        rest, _ = running.communicate(timeout=20)
        assert f"polite/0 got {signum.name}".encode() in rest
        assert running.returncode == 40 + signum
    finally:
        running.kill()


def test_detach_prints_a_name_and_the_job_goes_on(lab: LabSession) -> None:
    name = lab.cli("run", "--detach", "--", *NUMBERS, "--lines", "100").out.strip()
    assert re.fullmatch(r"[a-z0-9-]+", name)
    followed = lab.cli("logs", "-f", f"{name}/0")
    assert numbered(followed.out, "out", name, "") == list(range(100))
    job = Job(lab, name, NUMBERS, 1, Path("/"))
    assert job.wait_end(10) == 0
