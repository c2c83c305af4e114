# SPDX-License-Identifier: Apache-2.0
"""Marks of tests for what this user or this machine may lack; pyproject.toml lists them."""

from __future__ import annotations

import os
import shutil

import pytest


def skip_where_lacking(item: pytest.Item) -> None:
    """To be called before a test is set up. `make test` counts what is skipped as failed."""
    if os.geteuid() != 0 and any(item.get_closest_marker(name) for name in ("root", "lab")):
        pytest.skip("only root can run this test")
    for mark in item.iter_markers("needs"):
        if shutil.which(mark.args[0]) is None:
            pytest.skip(f"the program {mark.args[0]} is not installed")
