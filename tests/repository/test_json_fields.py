# SPDX-License-Identifier: Apache-2.0
"""docs/json.md names every command with ``-o json``, and every field that it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import json_fields
import json_records as records
import pytest
import typer.core
import typer.main
from checkout import ROOT
from cli_harness import Call

from liveshift.launcher import cli
from liveshift.launcher.checks.doctor import doctor
from liveshift.launcher.commands import lab_cmd

CLUSTER = """\
[cluster]
name = "c"
orchestrator = "127.0.0.1:7400"
overlay = "10.99.0.0/16"
[paths]
keys = "{0}/keys"
run = "{0}/run"
"""


def test_the_page_is_as_the_installed_package_prints() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/json_fields.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_it_shows_what_a_script_looks_for_first() -> None:
    text = (ROOT / "docs/json.md").read_text()
    status = text.partition("## Status\n")[2].partition("\n## ")[0]
    assert "| `jobs` | list of [JobRow](#jobrow) |" in status
    move = text.partition("## MigrationRow\n")[2].partition("\n## ")[0]
    assert "| `frozen_s` | number |" in move


def with_json(group: Any, *path: str) -> Iterator[str]:
    """The commands below a group that have an output option, of which one choice is json."""
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from with_json(command, *path, name)
            continue
        outputs = [p for p in command.params if "--output" in p.opts]
        if any("json" in set(option.type_descriptor.annotation) for option in outputs):
            yield " ".join((*path, name))


def test_every_command_with_a_json_output_is_there() -> None:
    found = set(with_json(typer.main.get_command(cli.app())))
    assert {"status", "drain", "doctor", "keys list", "lab list"} <= found
    listed = {command.partition(" [")[0].partition(" --")[0] for command in json_fields.COMMANDS}
    assert listed - {"events mN"} == found


def names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def test_what_is_written_by_hand_is_what_commands_print(
    gpt: Any, call: Call, tmp_path: Path
) -> None:
    def said(*words: str) -> Any:
        _, out, err = call(*words, "-o", "json")
        assert out, err
        return json.loads(out)

    assert list(said("drain", "h1", "--dry-run")) == names(records.DrainPlan)
    assert list(said("taint", "h2", "--reason", "x")) == names(records.Tainted)
    drained = said("drain", "h1")  # gpt/1 finds no spare
    assert list(drained) == names(records.Drained)
    assert list(drained["refused"]["gpt/1"]) == names(records.Reason)
    assert list(said("snapshot", "gpt", "--to", "/nfs")) == names(records.Saved)
    assert list(said("suspend", "gpt")) == names(records.Suspended)
    assert list(said("resume", "gpt")) == names(records.Resumed)
    assert list(said("stop", "gpt")) == names(records.Stopped)

    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(tmp_path))
    for name, address in (("h0", "127.0.0.2"), ("h1", "127.0.0.3")):
        added = said("host", "add", name, address, "-c", str(path))
        assert list(added) == names(records.Changed)
    assert list(said("host", "remove", "h1", "-c", str(path))) == names(records.Changed)
    assert list(said("keys", "list", "-c", str(path))[0]) == names(records.KeyEntry)
    checked = said("config", "validate", str(path))
    assert list(checked) == names(records.Validated)
    assert list(checked["rules"][0]) == names(records.DeadlineRule)
    shown = said("config", "show", str(path))
    assert list(shown) == names(records.Configuration)
    assert list(shown["settings"][0]) == names(records.Setting)
    assert list(shown["environment"][0]) == names(records.Variable)
    assert list(lab_cmd._row("none")) == names(records.LabRow)


def test_what_the_doctor_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liveshift.launcher.checks.doctor.examine", lambda criu, reading: [])
    assert doctor("json", None) == 0
    assert list(json.loads(capsys.readouterr().out)) == names(records.Examined)
