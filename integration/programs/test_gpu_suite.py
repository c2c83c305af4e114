# SPDX-License-Identifier: Apache-2.0
"""The short form of ``make gpu-suite``, on the doubles: each step must have done its work."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab_session import BIN, ROOT, environment
from whereabouts import every_pid

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300), pytest.mark.long]

RUN = ROOT / "integration" / "gpu" / "run"
RESULTS = ROOT / "integration" / "gpu" / "results"
MIB = 1 << 20


def suite(out: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Run it on the simulated driver; its results, as its file has them."""
    kept = sorted(RESULTS.glob("*"))  # before a GPU has been here, there is no such folder
    done = subprocess.run(
        [RUN, "--simulated", "--short", "--out", out, *words],
        env=environment(VENV=str(BIN.parent)),
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stderr + done.stdout
    (written,) = done.stdout.splitlines()
    assert sorted(RESULTS.glob("*")) == kept, "no GPU has been here"
    assert Path(written).parent == out
    assert Path(written).name.startswith("simulated-")
    assert Path(written).with_suffix(".md").read_text().startswith("# GPU suite: **the simulated")
    told: dict[str, Any] = json.loads(Path(written).read_text())
    assert told["simulated"] is True
    return told


@pytest.fixture(scope="module")
def told(place: Path) -> dict[str, Any]:
    """All but E6, of which test_gpu_moves.py sees the like, and E10, which has its own test."""
    return suite(place / "gpu-suite", "E1", "E2", "E3", "E4", "E5", "E7", "E8", "E9")


def test_all_steps_passed_and_time_was_judged_of_none(told: dict[str, Any]) -> None:
    assert {name: step["why"] for name, step in told["steps"].items() if not step["passed"]} == {}
    assert list(told["steps"]) == ["E3", "E2", "E1", "E4", "E5", "E7", "E9", "E8"]
    judged = {goal["what"]: goal["met"] for goal in told["goals"] if goal["met"] is not None}
    assert judged == {"E5 bit-identical": True}


def test_bytes_came_back(told: dict[str, Any]) -> None:
    figures = {name: step["figures"] for name, step in told["steps"].items()}
    for name, by in (("1 × 2 MiB", 2 * MIB), ("10 × 2 MiB", 20 * MIB)):
        plain, fast = figures["E1"][name], figures["E4"][name]
        assert plain["bytes_intact"] is fast["bytes_intact"] is True
        assert fast["handed over_bytes"] >= by
        assert 0 < plain["checkpoint_s"] < plain["frozen_s"]
        assert 0 < fast["save_s"] < fast["frozen_s"]
    assert figures["E2"]["content"]["bytes"] == 8 * 8 * MIB
    assert all(rate > 0 for rate in figures["E2"]["through the ring, GB per s"].values())
    for variant in ("mapped", "half", "all", "handed"):
        assert figures["E3"][variant]["works"] is True
        assert figures["E3"][variant]["checkpoint"]["state"] == "CHECKPOINTED"


@pytest.mark.long
def test_a_killed_rank_goes_back_to_its_snapshot(place: Path) -> None:
    step = suite(place / "gpu-suite-snapshots", "E10")["steps"]["E10"]
    assert (step["passed"], step["bit_identical"]) == (True, True), step["why"]
    assert "on the simulated driver: these are no seconds of a GPU" in step["remarks"]
    for name in ("32mib", "128mib"):
        figures = step["figures"][name]
        for number in (1, 2):
            assert (
                figures[f"snapshot {number}"]["pause_s"] > figures[f"snapshot {number}"]["lock_s"]
            )
        assert figures["images_bytes"] > 32 * MIB
        assert figures["kill to the first new step_s"] > 0
        assert "runs again from s" in figures["rewind"]
    assert "pause per GiB_s" in step["figures"]


def test_a_training_process_moved_by_the_fast_path(told: dict[str, Any]) -> None:
    step = told["steps"]["E5"]
    assert step["bit_identical"] is True
    figures = step["figures"]
    assert figures["hosts"] == {host: "the fast path is available" for host in ("h0", "h1")}
    assert figures["ctypes"]["steps"] >= 20
    assert figures["ctypes"]["move 1"]["gpu memory"]["bytes"] >= 24 * MIB
    assert "from GPU to GPU" in figures["ctypes"]["move 1"]["gpu save"]["detail"]


def test_contracts_refusals_and_ratios(told: dict[str, Any]) -> None:
    contract, refusals, cost = (told["steps"][name]["figures"] for name in ("E7", "E8", "E9"))
    assert len(contract) >= 13
    assert sum(program["claims that hold"] for program in contract.values()) >= 80
    assert "managed memory" in refusals["managed"]["said"]
    assert refusals["managed"]["driver, checkpoint"]["result"] == 801
    assert refusals["nothing"]["said"] == "it can move"
    assert 0.1 < cost["all-reduce"]["1 KiB"]["gate_ratio"] < 10
    assert 0.1 < cost["training step"]["arena_ratio"] < 10
    assert cost["all-reduce"]["gate, all-reduces seen"] > 100
    assert cost["training step"]["arena, all-reduces seen"] > 10


@pytest.mark.long
def test_a_step_that_hangs_costs_only_itself(place: Path) -> None:
    told = suite(place / "gpu-suite-hangs", "E9", "E3", "--deadline", "2.5", code=1)
    over, after = told["steps"]["E9"], told["steps"]["E3"]
    assert over["ran"]
    assert not over["passed"]
    assert "not done after 2 s" in over["why"]
    assert "figures" in after
    commands = map(_command, every_pid())
    # The command line of a whole test run may name this file. That process does not count.
    outlived = [
        words
        for words in commands
        if "gpu_suite" in words and str(BIN) in words and "whole_run.py" not in words
    ]
    assert outlived == [], "processes of the suite have outlived it"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
