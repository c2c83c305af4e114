# SPDX-License-Identifier: Apache-2.0
"""The doctor's table and its exit code, on this very host."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster_files import SMALL
from cuda_process import doubles
from doubles.gpu import build
from rich.console import Console

from liveshift.launcher.checks import deadlines, kernel, machine, network
from liveshift.launcher.checks import doctor as examination
from liveshift.launcher.checks.doctor import doctor, examine
from liveshift.launcher.checks.finding import Finding, Verdict, attempt
from liveshift.runtime.config.cluster import parse
from liveshift.runtime.config.timeouts import Timeouts

__all__ = ["doubles"]


def _examined(capsys: pytest.CaptureFixture[str], criu: str | None = None) -> tuple[int, Any]:
    code = doctor("json", criu)
    return code, json.loads(capsys.readouterr().out)


def test_the_exit_code_is_what_the_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = _examined(capsys)
    failed = [row["check"] for row in told["checks"] if row["verdict"] == "fail"]
    assert told["ok"] is (not failed)
    assert code == (1 if failed else 0)
    for row in told["checks"]:
        assert row.keys() == {"check", "found", "needed", "verdict", "advice"}
        assert row["found"]
        assert row["needed"], f"{row['check']} broke: {row['found']}"
        assert row["verdict"] == "ok" or row["advice"], f"nothing to do about {row['check']}"


@pytest.mark.root
def test_everything_asked_for_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    _, told = _examined(capsys)
    assert {row["check"] for row in told["checks"]} >= {
        "privileges",
        "CAP_SYS_RESOURCE",
        "kernel",
        "checkpoint/restore",
        "namespaces",
        "veth",
        "bridge",
        "VXLAN",
        "nftables",
        "fence",
        "forwarding",
        "lab's bad links",
        "CRIU",
        "python",
        "torch",
        "interposer",
        "memory",
        "pipe-max-size",
        "/run",
        "write tracking",
        "deadlines",
        "GPU driver",
    }


def test_a_bad_criu_fails_and_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = tmp_path / "criu"
    old.write_text("#!/bin/sh\necho 'Version: 3.17.1'\n")
    old.chmod(0o755)
    code, told = _examined(capsys, str(old))
    assert code == 1
    (row,) = [row for row in told["checks"] if row["check"] == "CRIU"]
    assert row["verdict"] == "fail"
    assert "3.17.1" in row["found"]
    assert str(old) in row["found"]


def test_the_table_has_every_row_and_a_closing_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor("table", None)
    out = capsys.readouterr().out
    for finding in examine(None):
        head = rf"^(ok|warn|fail) +{re.escape(finding.check)} "
        assert re.search(head, out, re.MULTILINE), finding.check
    closing = out.strip().splitlines()[-1]
    assert (
        closing.startswith("The main job can't run here: ") if code else "can run here" in closing
    )
    assert "\x1b" not in out, "no colours in a pipe"
    warned = re.findall(r"^warn +(.+?)  ", out, re.MULTILINE)
    assert not warned or f"{len(warned)} warning" in closing
    assert all(name in closing for name in warned)


LONG = Finding("a check", "found " * 40, "needed " * 20, Verdict.WARN, "do this " * 30)


def test_a_finding_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, "examine", lambda *_: [LONG])
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    assert doctor("table", None) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line) for line in lines) <= 80
    text = " ".join(" ".join(lines).split())
    for words in (LONG.found, f"needed: {LONG.needed}", f"do: {LONG.advice}"):
        assert words.strip() in text, "nothing is cut"


def test_a_pipe_gets_a_line_for_each_thing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = Finding("fine", "it is", "nothing", Verdict.OK)
    monkeypatch.setattr(examination, "examine", lambda *_: [LONG, fine])
    assert doctor("table", None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0] == f"warn  a check  {LONG.found.strip()}"
    assert lines[3:] == [
        "ok    fine     it is",
        "The main job can run here, with 1 warning (a check).",
    ]
    doctor("json", None)
    assert json.loads(capsys.readouterr().out)["warnings"] == 1


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("a [/odd] word")

    monkeypatch.setattr(machine, "memory", broken)
    rows = {finding.check: finding for finding in examine(None)}
    assert rows["memory"].verdict is Verdict.FAIL
    assert "a [/odd] word" in rows["memory"].found
    assert "/run" in rows, "the others are still looked at"
    assert doctor("table", None) == 1


def test_the_deadlines_are_those_of_the_cluster_file(tmp_path: Path) -> None:
    text = f'{SMALL}[timeouts]\ncollective = 60\n[paths]\nstate = "{tmp_path}/a/b"\n'
    (finding,) = [f for f in examine(None, parse(text, "prod.toml")) if f.check == "deadlines"]
    in_a_line = (
        "heartbeat 0.2 < suspicion 1 < freeze 12 + restore 12 < standstill 30 < collective 60 s"
    )
    assert finding.found.startswith(f"{in_a_line} (prod.toml); at worst a thread overslept by ")
    assert re.search(r", fsync took \d+\.\d ms$", finding.found)
    assert not list(tmp_path.iterdir()), "nothing is left"
    (finding,) = [f for f in examine(None) if f.check == "deadlines"]
    assert "collective 600 s (the defaults: no --config)" in finding.found


def test_the_gpu_libraries_are_those_of_the_cluster_file(doubles: build.Doubles) -> None:
    text = f'{SMALL}[gpu]\nlibraries = "{doubles.folder}"\n'
    (finding,) = [f for f in examine(None, parse(text, "prod.toml")) if f.check == "GPU driver"]
    assert "CUDA 13.0" in finding.found
    assert "simulated GPU" in finding.found


def test_a_host_too_slow_for_its_deadlines_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deadlines, "_synced", lambda directory: 1.5)
    (finding,) = deadlines.deadlines(Timeouts(), tmp_path, "here")
    assert finding.verdict is Verdict.WARN
    assert "fsync took 1500.0 ms" in finding.found
    assert "set timeouts.suspicion to 7.5 or more" in finding.advice
    (finding,) = deadlines.deadlines(Timeouts(suspicion=7.5), tmp_path, "here")
    assert finding.verdict is Verdict.OK


def test_a_journal_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (finding,) = deadlines.deadlines(Timeouts(), file, "here")
    assert finding.found.endswith(f"fsync in {file} could not be tried")


@pytest.mark.root
def test_the_network_is_tried_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def noting(*command: str, script: str | None = None) -> str | None:
        commands.append(command)
        return attempt(*command, script=script)

    monkeypatch.setattr(network, "attempt", noting)
    rows = {finding.check: finding for finding in network.links()}
    assert {"veth", "bridge", "VXLAN", "nftables", "fence", "lab's bad links"} <= rows.keys()
    assert ("ip", "netns", "add", f"lsdoc-{os.getpid()}") in commands
    assert not list(Path("/run/netns").glob(f"lsdoc-{os.getpid()}"))


@pytest.mark.root
def test_a_killed_doctors_namespace_is_swept_away() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    stale = f"lsdoc-{child.pid}"
    subprocess.run(["ip", "netns", "add", stale], check=True)
    try:
        list(network.links())
        assert not Path("/run/netns", stale).exists()
    finally:
        subprocess.run(["ip", "netns", "delete", stale], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.root
def test_a_network_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LOCK_AND_MASQUERADE", "table inet x { chain y { nonsense } }")
    rows = {finding.check: finding for finding in network.links()}
    assert rows["nftables"].verdict is Verdict.FAIL
    assert rows["fence"].verdict is Verdict.OK
    assert "nonsense" in rows["nftables"].found or "Error" in rows["nftables"].found
    assert not list(Path("/run/netns").glob(f"lsdoc-{os.getpid()}"))


def test_a_missing_program_is_named() -> None:
    assert (
        attempt("liveshift-no-such-program") == "the program liveshift-no-such-program is missing"
    )
    assert attempt("sh", "-c", "echo first; echo second; exit 3") == "first"
    assert attempt("sh", "-c", "exit 3") == "sh ended with 3"
    assert attempt("true") is None


def test_a_kernel_that_is_too_old_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "5.4.0-90-generic")
    (finding,) = kernel.release()
    assert finding.verdict is Verdict.FAIL
