# SPDX-License-Identifier: Apache-2.0
"""What the scenarios share: a place for results, reference runs, labs that leave nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from lab_place import a_place, lab_name, shared_place
from lab_session import BRISK, LabSession, NewLab, a_lab, environment
from longest_files import begin_with_longest
from machine_needs import skip_where_lacking
from open_python import NOBODY, OpenPython, opened_python
from reference_runs import References

# Started from a background shell we would ignore SIGINT, and hand that on to what we interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `import torch` makes this directory, and would make it below /tmp.
_CACHE = Path(__file__).resolve().parents[1] / "build/torchinductor"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_CACHE)

pytest.register_assert_rewrite("bare_labs")  # what its fixtures find left over is shown

_labs: list[LabSession] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_where_lacking(item)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin_with_longest(items)


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A directory for this session's results; $LIVESHIFT_TEST_KEEP leaves it there."""
    if os.geteuid() != 0:
        pytest.skip("a lab is made of namespaces, which needs root")
    with a_place(kept=bool(os.environ.get("LIVESHIFT_TEST_KEEP"))) as directory:
        yield directory


@pytest.fixture(scope="session")
def references(place: Path) -> References:
    return References(shared_place(place, "references"), environment())


@pytest.fixture(scope="session")
def open_python(place: Path) -> Iterator[OpenPython]:
    """A Python that an unprivileged user can run too."""
    with opened_python(NOBODY, place) as opened:
        yield opened


@pytest.fixture(scope="session")
def new_lab_name() -> Callable[[], str]:
    """Names that no other test run on this machine uses."""
    return lab_name


@pytest.fixture(scope="module")
def new_lab(place: Path, new_lab_name: Callable[[], str]) -> Iterator[NewLab]:
    """Makes labs that live until the module ends."""
    with ExitStack() as stack:

        def make(*options: str, python: str = sys.executable) -> LabSession:
            if "--precopy" not in options:
                options = (*options, *BRISK)
            made = stack.enter_context(a_lab(new_lab_name(), place, *options, python=python))
            _labs.append(made)
            stack.callback(_labs.remove, made)
            return made

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and report.when != "teardown":
        for session in _labs:
            report.sections.append((f"lab {session.name}", session.last_words()))
    return report
