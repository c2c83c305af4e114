# SPDX-License-Identifier: Apache-2.0
"""What a destination checks in its preflight: the facts of both hosts, and a CRIU."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.survey.found import Survey
from liveshift.runtime.messages import HostFacts

HERE = HostFacts("6.1.0", "x86_64", "Xeon", ["avx", "avx2", "fma"], "4.2.1", "0.1.0")
NOTHING = Survey((1001,), 100 << 20, 10 << 20, (), (), (), (), ())


@pytest.fixture
def criu(tmp_path: Path) -> Criu:
    """A program that says of itself that it works."""
    return program(tmp_path / "criu", "echo Looks good.")


def program(path: Path, body: str) -> Criu:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return Criu(path, (4, 2, 1), (str(path),))
