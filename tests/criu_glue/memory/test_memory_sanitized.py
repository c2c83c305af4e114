# SPDX-License-Identifier: Apache-2.0
"""criu_glue's C under the sanitizers: the tests that use memory.so run again, with one that was
built with the address, the undefined-behaviour or the thread sanitizer.

Python itself is built without them, so the sanitizer's library is preloaded into it. Python's
locks are pthread's, which the thread sanitizer sees; so it knows what they order.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import sanitizers

TESTS = Path(__file__).resolve().parents[2]
PLUGINS = TESTS / "support"
USES = re.compile(r"^from liveshift\.criu_glue\.memory\.", re.MULTILINE)
TIMED = "tests/criu_glue/memory/source/test_userfault.py::test_it_takes_less_than_five_milliseconds"
"""It holds for the C without a sanitizer."""
QUICK = "not lab and not long and not alone"
OPTIONS = {
    # A finding ends the process by SIGABRT. Leaks are no finding here, as Python leaves some at its
    # end: findings() picks those of the library.
    "ASAN_OPTIONS": "abort_on_error=1:exitcode=0:detect_leaks=1:allocator_may_return_null=1"
    f":{sanitizers.GUESSES_NO_TLS}",
    "TSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:die_after_fork=0"
    f":atexit_sleep_ms=20:{sanitizers.GUESSES_NO_TLS}",
    "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
}

pytestmark = pytest.mark.timeout(300)


def uses_memory() -> list[Path]:
    """The files of tests that use the library in this process."""
    others = (Path(__file__).name, "test_memory_declarations.py")  # they run a compiler
    files = [f for f in sorted(TESTS.rglob("test_*.py")) if f.name not in others]
    return [f for f in files if USES.search(f.read_text())]


def run(name: str, library: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """This Python with the library in place of the installed one."""
    environment = os.environ | OPTIONS
    environment |= {
        "LD_PRELOAD": str(sanitizers.runtime(name)),
        "LIVESHIFT_TEST_MEMORY": str(library),
        "PYTHONPATH": str(PLUGINS),
        "PYTHONMALLOC": "malloc",  # so that the sanitizer sees each object of Python by itself
    }
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def run_tests(
    name: str, library: Path, tests: Sequence[Path], *, root: bool = False
) -> subprocess.CompletedProcess[str]:
    """Those of ``tests`` that need root, or those that do not."""
    chosen = f"{'' if root else 'not '}root and {QUICK}"
    pytest_words = ["-m", "pytest", "-q", "-x", "-s", "-p", "other_memory", "-p", "no:xdist"]
    # Its own limits: it runs beside other tests, and several times slower.
    pytest_words += ["-m", chosen, "-o", "timeout=240", "-o", "cache_dir=build/pytest-sanitized"]
    pytest_words += ["--deselect", TIMED]
    return run(name, library, *pytest_words, *map(str, tests))


def findings(said: str) -> list[str]:
    """What the sanitizers report, without what is not the library's."""
    wrong = r"(?:ERROR: AddressSanitizer|WARNING: ThreadSanitizer|runtime error): .*"
    parts = re.split(r"\n(?=(?:Direct|Indirect) leak of )", said)[1:]
    # A store that a test has left open is the test's.
    lost = [part for part in parts if re.search(r"#1 .* in (?!store_open).*/\w+\.c:\d+", part)]
    direct = [part for part in lost if part.startswith("Direct")]
    return [*re.findall(wrong, said), *direct]


def chosen(whose: str) -> list[Path]:
    own = [f for f in uses_memory() if f.is_relative_to(Path(__file__).parent)]
    if whose == "those of its users":
        return [f for f in uses_memory() if f not in own]
    return [f for f in own if whose == "its own tests" or whose in (f.parent.name, f.stem)]


@pytest.mark.parametrize(
    ("name", "whose", "least"),
    [
        ("address", "test_memory_store", 9),
        ("thread", "test_source_to_store", 9),
        *(
            pytest.param(name, whose, 50, marks=pytest.mark.long)
            for whose in ("its own tests", "those of its users")
            for name in ("address", "thread")
        ),
    ],
)
def test_nothing_is_found(name: str, whose: str, least: int) -> None:
    _clean(name, run_tests(name, sanitizers.memory_library(name), chosen(whose)), least)


@pytest.mark.root
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["address", "thread"])
def test_nothing_is_found_while_other_processes_are_followed_and_filled(name: str) -> None:
    """The tracker, the userfaultfds and the fill need root."""
    own = [f for f in chosen("its own tests") if f.name not in TOO_SLOW[name]]
    _clean(name, run_tests(name, sanitizers.memory_library(name), own, root=True), 60)


TOO_SLOW = {
    "address": {"test_memory_churn.py"},
    "thread": {"test_memory_churn.py", "test_userfault.py"},
}
"""These race with processes that change all the time. With that sanitizer they lose each race."""


def _clean(name: str, done: subprocess.CompletedProcess[str], least: int) -> None:
    """At least so many tests passed, and the sanitizer has reported nothing."""
    said = done.stdout + done.stderr
    assert (done.returncode, findings(said)) == (0, []), f"{name}: {said}"
    assert int(re.findall(r"(\d+) passed", said)[-1]) >= least


FUZZ = """
import runpy, sys
import other_memory
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_nothing_is_found_in_what_another_host_may_send(tmp_path: Path) -> None:
    sanitizers.runtime("address")
    words = ["--child", "memory", "--engine", "mutations", "--runs", "1500", "--seed", "1"]
    fuzz = TESTS / "fuzz"
    library = sanitizers.memory_library("address")
    done = run("address", library, "-c", FUZZ, fuzz, *words, "--findings", tmp_path)
    said = done.stdout + done.stderr
    assert (done.returncode, findings(said), list(tmp_path.iterdir())) == (0, [], []), said
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["executions"] >= 1500, row["findings"]) == (True, []), row


LOCK, UNLOCK = "pthread_mutex_lock(&pull->lock);", "pthread_mutex_unlock(&pull->lock);"
DEFECTS = {
    "too little memory": (
        *("address", "store/page_map.c", "calloc(1, sizeof *leaf)", "calloc(1, sizeof *leaf - 8)"),
        *("test_memory_store.py", "heap-buffer-overflow"),
    ),
    "memory is lost": (
        *("address", "store/page_map.c", "free(map->table[i]);", ";"),
        *("test_memory_store.py", "Direct leak"),
    ),
    "a shift by too much": (
        *("address", "source/sent.h", "UINT64_C(1) << index % 64", "1 << index % 64"),
        *("test_source_to_store.py", "left shift of 1 by"),
    ),
    "a lock is not taken": (
        *("thread", "source/pull.c", LOCK, ";"),
        *("test_source_to_store.py", "data race"),
    ),
}


@pytest.mark.parametrize(
    "defect",
    [
        "too little memory",
        "a lock is not taken",
        *(
            pytest.param(d, marks=pytest.mark.long)
            for d in ("memory is lost", "a shift by too much")
        ),
    ],
)
def test_a_defect_is_found(defect: str, tmp_path: Path) -> None:
    name, file, good, bad, test, words = DEFECTS[defect]
    sanitizers.runtime(name)
    shutil.copytree(sanitizers.MEMORY, tmp_path / "memory")
    changed = tmp_path / "memory" / file
    text = changed.read_text()
    assert good in text
    changed.write_text(text.replace(good, bad).replace(UNLOCK, ";" if bad == ";" else UNLOCK))
    (tests,) = TESTS.rglob(test)
    library = sanitizers.memory_library(name, tmp_path / "memory")
    done = run_tests(name, library, [tests])
    assert words in "".join(findings(done.stdout + done.stderr)), done.stdout + done.stderr
