# SPDX-License-Identifier: Apache-2.0
"""What is installed, from which files it is rebuilt, under which version and dependencies."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT
from packaging.requirements import Requirement

import liveshift

FOLDERS = ("criu_glue", "cuda_snapshot", "interposer", "launcher", "runtime")
NEEDED = ("meson.build", "pyproject.toml", "README.md", "LICENSE")


def sources(root: Path) -> Iterator[Path]:
    """The product's files, relative to the root."""
    yield from (path.relative_to(root) for path in root.glob("*.py"))
    yield Path("py.typed")
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(root)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product's sources, and files that no host must get."""
    place = tmp_path_factory.mktemp("copy") / "source"
    for path in [*sources(ROOT), *map(Path, NEEDED)]:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, place / path)
    for name in ("tests/test_x.py", "integration/x.py", "docs/x.svg", "examples/train.py"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).touch()
    cache = place / "runtime/__pycache__"
    cache.mkdir()
    (cache / "x.cpython-311.pyc").touch()
    return place


def installed(source: Path, build: Path) -> set[str]:
    """The files that meson would install, relative to the package."""
    meson = [Path(sys.prefix, "bin/meson")]
    again = ["--reconfigure"] if build.exists() else []
    subprocess.run([*meson, "setup", *again, build, source], check=True, capture_output=True)
    words: list[str | Path] = [*meson, "introspect", "--installed", build]
    found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return {path.rpartition("/liveshift/")[2] for path in found.values()}


def test_all_files_but_the_sources_of_c_are_installed(copy: Path, tmp_path: Path) -> None:
    found = installed(copy, tmp_path / "build")
    c = (".c", ".h", ".build")
    assert {name for name in found if (ROOT / name).exists()} == {
        path.as_posix() for path in sources(ROOT) if path.suffix not in c
    }, "meson.build lists the suffixes of files to install"
    assert {name for name in found if not (ROOT / name).exists()} == {
        "criu_glue/capsule/capsule-init",
        "criu_glue/criu/criu-hook",
        "criu_glue/criu/interrupted_shim.so",
        "criu_glue/criu/page_filter_shim.so",
        "criu_glue/criu/rlimit_shim.so",
        "criu_glue/memory/memory.so",
        "criu_glue/memory/prefill/prefill_shim.so",
        "interposer/liveshift_interposer.so",
    }
    # pip configures anew before each build, as here.
    (copy / "runtime/new_file.py").touch()
    assert installed(copy, tmp_path / "build") == found | {"runtime/new_file.py"}


def test_the_version_is_stated_once() -> None:
    assert liveshift.__version__ == importlib.metadata.version("liveshift")
    for name in ("meson.build", "pyproject.toml"):
        assert liveshift.__version__ not in (ROOT / name).read_text()


def test_the_changelog_has_the_version_and_what_is_unreleased() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    releases = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert releases[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(liveshift.__version__)} - \d{{4}}-\d\d-\d\d", releases[1])
    sections = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_a_change_of_any_file_of_the_product_is_built_before_tests_run(tmp_path: Path) -> None:
    def make(*words: str) -> str:
        command = ["make", "--dry-run", f"VENV={tmp_path}", *words]
        clean = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        return subprocess.run(
            command, cwd=ROOT, env=clean, check=True, capture_output=True, text=True
        ).stdout

    for name in ("system", "venv", "requirements", "test-requirements", "package"):
        (tmp_path / "stamps").mkdir(exist_ok=True)
        (tmp_path / "stamps" / name).touch()  # in this order, each newer than the last
    built = "scripts/setup.sh package"
    assert built not in make("test-fast")
    for name in ("cores.py", "__init__.py", "launcher/report/page.css", "interposer/gate/gate.c"):
        assert built in make("--what-if", name, "test-fast"), name
    (line,) = re.findall(r"^\S+/stamps/package: (.*)", make("--print-data-base"), re.MULTILINE)
    files = set(line.split())
    assert {path.as_posix() for path in sources(ROOT)} <= files
    assert {"meson.build", "pyproject.toml"} <= files


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
