# SPDX-License-Identifier: Apache-2.0
"""The tests of process 1, of CRIU's hook and of its shims run again: the two programs under the
address sanitizer, all of them with checks for undefined behaviour."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT
from sanitized_programs import SanitizedPackage

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
OUTPUT = HERE / "test_sandbox_output.py"
AHEAD = HERE.parent / "criu" / "test_started_ahead.py"


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ls-sanitized-", dir="/var/tmp") as made:
        yield Path(made)


@pytest.mark.parametrize(
    ("files", "least"),
    [
        pytest.param((OUTPUT, AHEAD), 15, id="some"),
        pytest.param((HERE, HERE.parent / "criu"), 100, marks=pytest.mark.long, id="all"),
    ],
)
def test_nothing_is_found(directory: Path, files: tuple[Path, ...], least: int) -> None:
    package = SanitizedPackage(directory)
    chosen = "root and not lab and not long and not alone"
    done = package.test("-m", chosen, f"--ignore={__file__}", *files)
    said = done.stdout + done.stderr
    assert (done.returncode, package.found()) == (0, []), said
    assert int(re.findall(r"(\d+) passed", said)[-1]) >= least


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("char buffer[RECORD]", "char buffer[20]", "ERROR: AddressSanitizer"),
        ("(uint64_t)now.tv_sec * 1000000000ULL", "(int)now.tv_sec * 1000000000", "signed integer"),
    ],
    ids=["too little memory", "an overflow"],
)
def test_a_defect_is_found(directory: Path, good: str, bad: str, words: str) -> None:
    sources = directory / "sources"
    shutil.copytree(ROOT / "criu_glue", sources, ignore=shutil.ignore_patterns("*.py"))
    changed = sources / "capsule" / "capsule_output.c"
    text = changed.read_text()
    assert good in text
    changed.write_text(text.replace(good, bad))
    package = SanitizedPackage(directory, sources)
    done = package.test("-x", "-m", "root", OUTPUT)
    assert done.returncode == 1
    assert words in "".join(package.found()), done.stdout + done.stderr
