# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the fast tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator

import pytest
from checkout import ROOT
from cli_harness import call, double, environment, gpt, start, terminal
from frames import ear
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir
from link_harness import key_directory
from longest_files import begin_with_longest
from machine_needs import skip_where_lacking
from nccl_coordinator import world, world_2_32
from three_hosts import net, serve
from tracked import job, pages, tracker

__all__ = [
    "call",
    "double",
    "ear",
    "environment",
    "gpt",
    "job",
    "key_directory",
    "net",
    "pages",
    "serve",
    "start",
    "terminal",
    "tracker",
    "world",
    "world_2_32",
]

# Started from a background shell we would ignore SIGINT, and hand that on to what we interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

BUILD = ROOT / "build"
"""All that tests leave behind lies there, and in pytest's own folder if one fails."""

set_hypothesis_home_dir(BUILD / "hypothesis")
# An example that takes long on a loaded machine has found nothing.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(BUILD / "torchinductor")  # made by `import torch`


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what pytest makes of the tests where LIVESHIFT_TEST_BYTECODE says, as a whole run does.

    pytest rewrites all assertions, which takes every worker of a run 15 seconds of CPU time. It
    keeps no result where Python writes no bytecode.
    """
    if not (kept := os.environ.get("LIVESHIFT_TEST_BYTECODE")):
        return (yield)
    before = sys.dont_write_bytecode, sys.pycache_prefix
    sys.dont_write_bytecode, sys.pycache_prefix = False, kept
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_where_lacking(item)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin_with_longest(items)
