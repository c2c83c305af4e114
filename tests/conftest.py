# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the fast tests."""

from __future__ import annotations

import os
import signal

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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_where_lacking(item)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin_with_longest(items)
