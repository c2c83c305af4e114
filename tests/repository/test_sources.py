# SPDX-License-Identifier: Apache-2.0
"""meson.build lists every file to install, and the check of that notices what is missing."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from checkout import ROOT
from packaging.requirements import Requirement
from repository_scripts import script

import liveshift

sources = script("sources")


def test_every_file_of_the_package_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sources.main(["--check"], ROOT) == 0, capsys.readouterr().out
    assert "runtime/__init__.py" in sources.wanted(ROOT)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small package whose list is right."""
    for name in ("__init__.py", "errors.py", "py.typed", "runtime/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "meson.build").write_text(
        f"py.install_sources(\n    {sources.BEGIN}\n    {sources.END}\n    subdir: 'x',\n)\n"
    )
    assert sources.main([], tmp_path) == 0
    assert sources.main(["--check"], tmp_path) == 0
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["runtime/new.py", "launcher/deep/down.py", "launcher/page.css", "launcher/a.service"],
)
def test_an_unlisted_file_is_named_and_then_listed(
    tree: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).touch()
    before = (tree / "meson.build").read_text()
    assert sources.main(["--check"], tree) == 1
    assert f"{name} is not listed" in capsys.readouterr().out
    assert (tree / "meson.build").read_text() == before, "--check changed the file"

    assert sources.main([], tree) == 0
    assert sources.main(["--check"], tree) == 0
    assert f"    '{name}',\n" in (tree / "meson.build").read_text()


def test_a_file_that_is_gone_is_named(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "runtime/__init__.py").unlink()
    assert sources.main(["--check"], tree) == 1
    assert "runtime/__init__.py is listed and does not exist" in capsys.readouterr().out


def test_files_that_are_no_part_of_the_package_stay_out(tree: Path) -> None:
    (tree / "tests").mkdir()
    (tree / "tests/test_x.py").touch()
    (tree / "runtime/notes.txt").touch()
    (tree / "setup.py").touch()
    assert sources.main(["--check"], tree) == 0


def test_the_version_is_said_once_and_the_same() -> None:
    stated = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text())
    assert stated is not None
    assert stated[1] == liveshift.__version__ == importlib.metadata.version("liveshift")


def test_the_lock_pins_every_dependency_in_a_version_that_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(name for extra in extras.values() for name in extra),
    ]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    by_name = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for text in needed:
        requirement = Requirement(text)
        assert requirement.name.lower() in by_name, f"{text} is not in requirements.lock"
        assert requirement.specifier.contains(by_name[requirement.name.lower()]), text
