# SPDX-License-Identifier: Apache-2.0
"""The short form of ``make compat``: every Python of this machine, and suites fetched before."""

from __future__ import annotations

from pathlib import Path

import pytest
from compat import trial, worlds
from lab_session import ROOT

pytestmark = [pytest.mark.timeout(300)]

SUITES = ROOT / "build" / "compat"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compat")
    trial.build(folder)
    return folder


@pytest.mark.long
def test_the_interposer_works_in_every_world_that_is_here(built: Path) -> None:
    found = [*worlds.pythons([]), *worlds.suites(SUITES, fetch=False)]
    results = [trial.attempt(w, built) for w in found if isinstance(w, worlds.World)]
    assert results
    assert [(r.world, r.problems) for r in results if r.problems] == []
    assert all(r.hooks >= 11 for r in results)
    assert any(r.torch_trained for r in results), "not even this environment's torch"
    assert all(r.identified for r in results if r.torch_trained)
