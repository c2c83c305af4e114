# SPDX-License-Identifier: Apache-2.0
"""Cluster files for the tests, and what is asked of them everywhere."""

from __future__ import annotations

import pytest
from checkout import ROOT
from hypothesis import HealthCheck, settings

from liveshift.runtime.config.cluster import parse
from liveshift.runtime.config.errors import WrongCluster
from liveshift.runtime.config.toml_lines import Key

EXAMPLE = ROOT / "docs" / "cluster.example.toml"

SMALL = """\
[cluster]
name = "prod"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"

[hosts.h0]
address = "10.88.0.10"

[hosts.h1]
address = "10.88.0.11"
"""

WITH_KEYS = f"""{SMALL}
[paths]
keys = "{{keys}}"
"""

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def mistakes(text: str) -> list[str]:
    with pytest.raises(WrongCluster) as caught:
        parse(text)
    assert caught.value.exit_code == 3
    return caught.value.message.splitlines()


def paths_in(value: object, at: Key = ()) -> set[Key]:
    if isinstance(value, dict):
        return {
            k for name, part in value.items() for k in {(*at, name)} | paths_in(part, (*at, name))
        }
    if isinstance(value, list):
        return {k for i, part in enumerate(value) for k in {(*at, i)} | paths_in(part, (*at, i))}
    return set()
