# SPDX-License-Identifier: Apache-2.0
"""`make test`: alone on its machine, every list of tests in any case, and none of them skipped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import lab_place
import machine_needs
import pytest
from checkout import ROOT
from repository_scripts import script
from waits import until

from liveshift.errors import Refused
from liveshift.launcher import alone

REAL_LOCK = alone.LOCK
HOLD = """
import sys, pathlib
from liveshift.launcher import alone
alone.LOCK = pathlib.Path(sys.argv[1])
with alone.alone("make test"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One of our own; we may be part of a whole run ourselves."""
    monkeypatch.delenv(alone.HOLDER, raising=False)
    for own in ("LIVESHIFT_TEST_FAILED", lab_place.MADE):  # a run sets them for its own lists
        monkeypatch.setenv(own, os.environ.get(own, ""))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # ten runs need none, and are quick
    monkeypatch.setattr(alone, "LOCK", tmp_path / "whole-run.lock")
    return tmp_path / "whole-run.lock"


def holder(lock: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", HOLD, str(lock)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_second_run_is_told_who_holds_the_machine_and_a_later_one_is_served(lock: Path) -> None:
    ends: tuple[Callable[[Any], None], ...] = (lambda p: p.stdin.close(), lambda p: p.kill())
    for end in ends:
        with holder(lock) as other:
            words = rf"make demo cannot start: make test \(process {other.pid}, in .*\) runs"
            with pytest.raises(Refused, match=words), alone.alone("make demo"):
                pytest.fail("two at once")
            end(other)
            other.wait()
            with alone.alone("make demo"):
                assert f"process {os.getpid()}" in lock.read_text()
            assert not lock.exists(), "a run leaves nothing behind"


def test_what_a_run_starts_is_part_of_it() -> None:
    with alone.alone("make test"), alone.alone("make demo"):
        pass
    with alone.alone("make test"):
        assert alone.HOLDER in os.environ
    assert alone.HOLDER not in os.environ


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One with a committed file, one that git ignores and one that it does not know."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / ".gitignore").write_text("build/\n*.pyc\n")
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    (folder / "own.pyc").touch()
    (folder / "notes").mkdir()
    (folder / "notes/mine").touch()
    return folder


@pytest.fixture
def runs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    runs = script("whole_run")
    monkeypatch.setattr(runs, "ROOT", checkout)
    (temporary := checkout.parent / "temporary").mkdir()
    monkeypatch.setattr(runs, "TEMPORARY", {temporary, checkout.parent / "none"})
    return runs


def arguments_for(folder: Path, **bodies: str) -> list[str]:
    """The arguments that run them; a file for each."""
    for name, body in bodies.items():
        text = f"import pathlib, pytest\n\ndef test_it():\n    {body}\n"
        (folder / f"test_{name}.py").write_text(text)
    names = [str(folder / f"test_{name}.py") for name in bodies]
    return ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder), *names]


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("assert True", 0),
        ("assert False", 1),
        ("pytest.skip('no hardware')", 1),
        ("pytest.xfail('not mended')", 1),
    ],
)
def test_every_list_is_run_and_a_skipped_test_is_a_failed_one(
    runs: ModuleType, tmp_path: Path, first: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "second"
    second = arguments_for(tmp_path, second=f"pathlib.Path({str(marker)!r}).touch()")
    lists = [*arguments_for(tmp_path, first=first), "--", *second]
    assert runs.main(["make test", "--", *lists]) == code
    assert marker.exists()
    said = capfd.readouterr().out
    assert ("1 skipped: a test that is skipped has not tested" in said) == ("pytest." in first)


def test_what_failed_in_any_list_is_said_again_at_the_end(
    runs: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = arguments_for(tmp_path, first="assert 'seen' == 'wanted', 'two\\nlines'")
    second = arguments_for(tmp_path, second="assert True", third="this is no Python")
    assert runs.main(["make test", "--", *first, "--", *second]) == 1
    said = capfd.readouterr().err.splitlines()
    named = [line.partition(".py")[0] for line in said]
    assert named == ["failed: test_first", "failed: test_third"]
    assert "::test_it: " in said[0]
    assert "test_first.py:4: AssertionError: two lines" in said[0]
    assert "SyntaxError" in said[1]


def test_a_process_that_a_test_gets_from_a_fork_server_has_nothing_of_the_package(
    runs: ModuleType, tmp_path: Path
) -> None:
    found = "'liveshift' in __import__('sys').modules"
    pool = "__import__('multiprocessing').get_context('forkserver').Pool(1)"
    body = f"with {pool} as pool: assert not pool.apply(eval, ({found!r},))"
    assert runs.main(["make test", "--", *arguments_for(tmp_path, one=body)]) == 0


@pytest.mark.parametrize(
    ("path", "code"),
    [("build/deep/result", 0), ("new", 1), ("notes/theirs", 1), ("cached.pyc", 1), ("own.pyc", 0)],
)
def test_what_tests_leave_in_the_checkout_is_named_and_fails_the_run(
    runs: ModuleType,
    checkout: Path,
    tmp_path: Path,
    path: str,
    code: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    left = checkout / path
    left.parent.mkdir(parents=True, exist_ok=True)
    body = f"pathlib.Path({str(left)!r}).write_text('more')"
    assert runs.main(["make test", "--", *arguments_for(tmp_path, one=body)]) == code
    said = capfd.readouterr().err
    assert (f"error: the tests have left {path}\n" in said) == (code == 1)
    assert "mine" not in said, "what was there before is its owner's"


@pytest.mark.parametrize(("name", "code"), [("place-x1", 1), ("ls-fuzz-x1", 1), ("tmpx1", 0)])
def test_what_tests_leave_among_temporary_files_is_named_and_fails_the_run(
    runs: ModuleType, tmp_path: Path, name: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    left = tmp_path / "temporary" / name
    (left.parent / "place-before").mkdir()
    body = f"pathlib.Path({str(left)!r}).mkdir()"
    assert runs.main(["make test", "--", *arguments_for(tmp_path, one=body)]) == code
    said = capfd.readouterr().err
    assert (f"error: the tests have left {left}\n" in said) == (code == 1)
    assert "place-before" not in said


def test_a_run_writes_no_bytecode_beside_the_sources(runs: ModuleType, tmp_path: Path) -> None:
    body = "import sys; assert sys.dont_write_bytecode"
    assert runs.main(["make test", "--", *arguments_for(tmp_path, one=body)]) == 0
    assert not list(tmp_path.glob("__pycache__"))


def test_what_pytest_makes_of_tests_is_kept_apart_from_them(tmp_path: Path) -> None:
    kept = {"PYTHONDONTWRITEBYTECODE": "1", "LIVESHIFT_TEST_BYTECODE": str(tmp_path)}
    words = ["-m", "pytest", "--collect-only", "-q", "-o", f"cache_dir={tmp_path}", "test_cores.py"]
    environment = os.environ | kept
    del environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
    subprocess.run([sys.executable, *words], cwd=ROOT / "tests", env=environment, check=True)
    assert len(list(tmp_path.rglob("test_cores.*-pytest-*.pyc"))) == 1


def test_without_git_a_run_counts_all_the_same(
    runs: ModuleType, checkout: Path, tmp_path: Path
) -> None:
    shutil.rmtree(checkout / ".git")
    body = f"pathlib.Path({str(checkout / 'new')!r}).touch()"
    assert runs.main(["make test", "--", *arguments_for(tmp_path, one=body)]) == 0


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("this machine has no tenth leg", 0),
        ("this machine has no shell", 1),
        ("this machine has no wish", 1),
        ("no tenth leg", 1),
    ],
    ids=["lacks it", "has it", "unknown", "other words"],
)
def test_only_what_the_machine_cannot_have_is_excepted_and_it_is_named(
    runs: ModuleType,
    tmp_path: Path,
    reason: str,
    code: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {"tenth leg": lambda: False, "shell": lambda: True}
    monkeypatch.setattr(runs.machine_needs, "FACTS", facts)
    bodies = {"first": f"pytest.skip({reason!r})", "second": "assert True"}
    own = {f"{name}_{tmp_path.name}": body for name, body in bodies.items()}  # all in this process
    arguments = arguments_for(tmp_path, **own)
    assert runs.one_run(arguments) == code
    said = capfd.readouterr().out
    assert ("not tested, as this machine has none: tenth leg (1)\n" in said) == (code == 0)
    assert ("error: 1 skipped" in said) == (code == 1)


def test_a_mark_names_what_a_test_needs_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Marked:
        def __init__(self, fact: str) -> None:
            self.marks = [pytest.mark.machine(fact).mark]

        def iter_markers(self, name: str) -> list[pytest.Mark]:
            return [mark for mark in self.marks if mark.name == name]

        def get_closest_marker(self, name: str) -> None: ...

    monkeypatch.setattr(machine_needs, "FACTS", {"leg": lambda: True, "wing": lambda: False})
    machine_needs.skip_where_lacking(cast(pytest.Item, Marked("leg")))
    with pytest.raises(pytest.skip.Exception) as skipped:
        machine_needs.skip_where_lacking(cast(pytest.Item, Marked("wing")))
    assert machine_needs.lacked(f"Skipped: {skipped.value}") == "wing"


def test_a_run_beside_another_is_refused(
    runs: ModuleType, lock: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with holder(lock) as other:
        assert runs.main(["make test", "--", *arguments_for(tmp_path, it="assert False")]) == 5
        assert f"process {other.pid}" in capfd.readouterr().err
        other.kill()


SETUP = """#!/bin/bash
[ $1 = system ] || exit 0  # the first of its steps
echo "$LIVESHIFT_WHOLE_RUN" >>began
while [ ! -e go ]; do sleep 0.02; done
"""
PYTHON = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
import alone
alone.LOCK = alone.Path({lock!r})
assert alone.LOCK.exists()
with alone.alone("make test"):
    print(os.getpid(), os.environ[alone.HOLDER], *sys.argv[1:3])
assert not alone.LOCK.exists()
"""


@pytest.fixture
def clone(tmp_path: Path, lock: Path) -> Path:
    """Of this checkout: its Makefile, whose setup waits for a file `go`, and whose Python takes the
    lock over and is done."""
    made = tmp_path / "clone"
    left_out = shutil.ignore_patterns(".*", "build", "__pycache__", "integration", "tests", "docs")
    shutil.copytree(ROOT, made, ignore=left_out)
    (made / "scripts/setup.sh").write_text(SETUP)
    source = (made / "launcher/alone.py").read_text()
    (made / "launcher/alone.py").write_text(source.replace(str(REAL_LOCK), str(lock)))
    (made / "alone.py").write_text(
        source.replace("from ..errors import", "from liveshift.errors import")
    )
    python = made / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(python=sys.executable, root=str(made), lock=str(lock)))
    python.chmod(0o755)
    return made


def made(clone: Path, target: str) -> subprocess.Popen[str]:
    words = ["make", "--no-print-directory", "-C", str(clone), target]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.Popen(
        words, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_second_run_in_a_clone_is_refused_while_the_first_one_is_set_up(
    clone: Path, lock: Path
) -> None:
    """Both would build one .venv, or the second one replace what the first one uses."""
    first = made(clone, "test")
    until((clone / "began").exists, 30)
    held = lock.read_text()
    pid = held.partition("(process ")[2].partition(",")[0]
    assert held == f"make test (process {pid}, in {clone})"
    for target in ("test", "demo", "test-lab", "test-long"):
        second = made(clone, target)
        said = second.communicate(timeout=30)[1]
        assert f"error: make {target} cannot start: {held} runs on this machine\nhint: " in said
        assert second.returncode != 0
    with pytest.raises(Refused) as refused, alone.alone("make test-long"):
        pytest.fail("two at once")
    assert f"error: {refused.value}\nhint: {refused.value.hint}\n" in said, "the same words"
    assert (clone / "began").read_text() == f"handed to {pid}\n", "set up once"
    assert lock.read_text() == held
    (clone / "go").touch()
    out, error = first.communicate(timeout=30)
    assert first.returncode == 0, error
    assert f"{pid} {pid} scripts/whole_run.py make test\n" in out, "it has become the run"
    assert not lock.exists()


def test_a_setup_alone_is_not_refused(clone: Path, lock: Path) -> None:
    (clone / "go").touch()
    with holder(lock) as other:
        setup = made(clone, "setup")
        setup.communicate(timeout=30)
        assert (setup.returncode, other.poll()) == (0, None)
        assert (clone / "began").read_text() == "\n"
        other.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_order_and_begins_no_other(
    tmp_path: Path, number: signal.Signals
) -> None:
    """What a test has made is taken down by it."""
    body = (
        f"import time\n    try:\n        pathlib.Path({str(tmp_path / 'began')!r}).touch()\n"
        f"        time.sleep(60)\n    finally:\n"
        f"        time.sleep(0.5)\n        pathlib.Path({str(tmp_path / 'ended')!r}).touch()"
    )
    second = arguments_for(tmp_path, second=f"pathlib.Path({str(tmp_path / 'second')!r}).touch()")
    script = [sys.executable, str(ROOT / "scripts" / "whole_run.py"), "make test", "--"]
    words = [*script, *arguments_for(tmp_path, first=body), "--", *second]
    environment = {**os.environ, alone.HOLDER: "the tests'"}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as run:
        until((tmp_path / "began").exists, 30)
        if number == signal.SIGINT:
            os.killpg(run.pid, number)  # as a terminal does
        else:
            run.send_signal(number)
        assert run.wait(30) == 130
    assert (tmp_path / "ended").exists()
    assert not (tmp_path / "second").exists()


def test_labs_and_places_that_a_killed_test_has_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest-xdist kills its processes some seconds after an interruption."""
    whole_run = script("whole_run")
    made, place = tmp_path / "made", tmp_path / "place"
    made.mkdir()
    (place / "results").mkdir(parents=True)
    (made / "place-1").write_text(str(place))
    for lab in ("tgone", "tleft"):
        (made / lab).write_text(f"/roots/{lab}")
    done: list[tuple[str, str, bool]] = []
    variable = whole_run.LAB_ROOT_VARIABLE
    monkeypatch.setenv(variable, "/roots/before")
    monkeypatch.setattr(whole_run.lab, "names", lambda: ["tleft", "somebodys"])
    monkeypatch.setattr(
        whole_run.lab,
        "down",
        lambda name: done.append((name, os.environ[variable], place.exists())),
    )
    whole_run.take_down(made)
    assert done == [("tleft", "/roots/tleft", True)]
    assert not place.exists()
