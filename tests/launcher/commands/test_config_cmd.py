# SPDX-License-Identifier: Apache-2.0
"""``liveshift config``: what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cluster_files import EXAMPLE, SMALL

from liveshift.launcher.commands import config_cmd
from liveshift.launcher.show import timeouts_view
from liveshift.runtime.config.cluster import load, parse
from liveshift.runtime.config.timeouts import DERIVATIONS


def validated(capsys: pytest.CaptureFixture[str], path: Path) -> Any:
    config_cmd.validate(path, "json")
    return json.loads(capsys.readouterr().out)


def test_validate_says_good_and_explains_the_deadlines(capsys: pytest.CaptureFixture[str]) -> None:
    config_cmd.validate(EXAMPLE)
    out, err = capsys.readouterr()
    assert err == ""
    first, rest = out.split("\n\n", 1)
    assert first.startswith(f'{EXAMPLE}: good: cluster "prod", 3 hosts, ')
    deadlines, rules = rest.split("\n\n")
    rows = {line.split()[0]: line for line in deadlines.splitlines()[1:]}
    assert list(rows) == [
        "heartbeat",
        "suspicion",
        "gpu_lock",
        "quiesce",
        "freeze",
        "restore",
        "standstill",
        "collective",
        "prepare",
        "precopy",
        "fault",
        "grace",
    ]
    assert rows["standstill"].split()[1:5] == ["300", "collective", "/", "2,"]
    assert re.search(r" 600  line \d+ +\S", rows["collective"])
    assert re.search(r"freeze \+ restore \+ 3 × suspicion = 255 ≤ standstill 300  +both a", rules)
    assert "2 × suspicion = 10 ≤ prepare 60, precopy 600, freeze 120, restore 120" in rules


def test_validate_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL + "[timeouts]\ncollective = 120\nfreeze = 20\n")
    told = validated(capsys, path)
    assert told["digest"] == load(path).digest
    assert (told["cluster"], told["hosts"]) == ("prod", ["h0", "h1"])
    steps = {step["name"]: step for step in told["deadlines"]}
    assert (steps["collective"]["seconds"], steps["collective"]["line"]) == (120, 12)
    assert steps["freeze"] == {
        "name": "freeze",
        "seconds": 20,
        "line": 13,
        "derived": "",
        "reached": "no image yet: the job runs on at the source",
    }
    assert (steps["restore"]["seconds"], steps["restore"]["line"]) == (24, None)
    assert steps["restore"]["derived"] == "2/5 of standstill"
    (rule,) = [rule for rule in told["rules"] if rule["bound"] == "standstill"]
    assert rule["sum"] == "freeze + restore + 3 × suspicion"
    assert (rule["seconds"], rule["bound_seconds"]) == (47, 60)


def test_every_deadline_has_its_words() -> None:
    assert timeouts_view.REACHED.keys() == DERIVATIONS.keys()


def test_show_is_a_cluster_file_with_the_origin_of_each_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL)
    config_cmd.show(path)
    out, err = capsys.readouterr()
    assert err == ""
    assert parse(out).cluster == load(path)
    rows = [line for line in out.splitlines() if " = " in line]
    derived = [row for row in rows if row.startswith("# ")]
    assert len(derived) == 10
    assert all(row.endswith("# default") or "# line " in row for row in rows if row not in derived)
    assert [row.split("  # ")[1] for row in derived if "heartbeat =" in row] == ["suspicion / 5"]
    (row,) = (row for row in rows if row.startswith("overlay"))
    assert row.endswith("# line 4")


def test_show_says_an_interval_in_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL + '[snapshots]\nevery = "30s"\n')
    config_cmd.show(path)
    shown, _ = capsys.readouterr()
    assert parse(shown).cluster == load(path)
    config_cmd.show(path, "json")
    settings = json.loads(capsys.readouterr().out)["settings"]
    (every,) = (setting for setting in settings if setting["key"] == "snapshots.every")
    assert every == {"key": "snapshots.every", "value": 30.0, "line": 12}


def test_show_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL)
    config_cmd.show(path, "json")
    shown = json.loads(capsys.readouterr().out)
    assert shown["digest"] == load(path).digest
    by_key = {setting["key"]: setting for setting in shown["settings"]}
    assert by_key["hosts.h1.address"] == {
        "key": "hosts.h1.address",
        "value": "10.88.0.11",
        "line": 10,
    }
    assert by_key["timeouts.grace"] == {"key": "timeouts.grace", "value": 10.0, "line": None}


def test_show_tells_the_environment_of_jobs_with_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL + "[env]\ndefaults = { NCCL_NVLS_ENABLE = false }\n")
    config_cmd.show(path)
    out, _ = capsys.readouterr()
    assert parse(out).cluster == load(path)
    assert re.search(r"^# NCCL_RAS_ENABLE=0 +# NCCL's RAS thread keeps", out, re.MULTILINE)
    assert re.search(r"^# NCCL_NVLS_ENABLE left alone +# multicast", out, re.MULTILINE)
    config_cmd.show(path, "json")
    told = json.loads(capsys.readouterr()[0])["environment"]
    assert {row["name"]: row["value"] for row in told}["NCCL_NVLS_ENABLE"] is None
    assert all(row["reason"] for row in told)
