# SPDX-License-Identifier: Apache-2.0
"""Which versions of CRIU, kernel and liveshift go together on two hosts."""

from __future__ import annotations

import msgspec
import pytest
from preflight_scene import HERE

from liveshift.runtime.messages import HostFacts
from liveshift.runtime.model import host_versions


def other(**versions: str) -> HostFacts:
    return msgspec.structs.replace(HERE, **versions)


@pytest.mark.parametrize(
    ("versions", "text", "remedy"),
    [
        (
            {"criu": "4.3"},
            "the image is of CRIU 4.3, and h2 has CRIU 4.2.1, which cannot read images of a later"
            " version",
            "install CRIU 4.3 or later on h2, or choose another host",
        ),
        (
            {"criu": "5.0.1"},
            "the image is of CRIU 5.0.1, and h2 has CRIU 4.2.1, which cannot read images of a"
            " later version",
            "install CRIU 5.0 or later on h2, or choose another host",
        ),
        (
            {"liveshift": "1.0.0"},
            "the image is of liveshift 1.0.0, and h2 has 0.1.0",
            "install liveshift 1.x on h2, or choose another host",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_both_versions(
    versions: dict[str, str], text: str, remedy: str
) -> None:
    assert host_versions.findings(other(**versions), HERE, "h2") == [(text, remedy)]


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"criu": "4.2"},
        {"criu": "4.2.9"},
        {"criu": "4.1"},
        {"criu": "3.19"},
        {"criu": ""},
        {"criu": "a build of ours"},
        {"kernel": "6.1.99-cloud"},
        {"liveshift": "0.1.7"},
        {"liveshift": "unknown"},
    ],
)
def test_what_works_is_let_pass_in_silence(versions: dict[str, str]) -> None:
    """CRIU reads images of earlier versions; a correction changes no format."""
    assert host_versions.findings(other(**versions), HERE, "h2") == []
    assert host_versions.warnings(other(**versions), HERE, "h2") == []


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"kernel": "6.12.9-cloud"}, "Linux 6.12.9-cloud, and h2 has 6.1.0"),
        ({"kernel": "5.15"}, "Linux 5.15, and h2 has 6.1.0"),
        ({"liveshift": "0.2.0"}, "liveshift 0.2.0, and h2 has 0.1.0"),
    ],
)
def test_what_may_fail_is_let_pass_with_a_warning(versions: dict[str, str], text: str) -> None:
    source = other(**versions)
    assert host_versions.findings(source, HERE, "h2") == []
    assert host_versions.warnings(source, HERE, "h2") == [
        f"the image is of a host with {text}: the restore may fail"
    ]


def test_a_version_counts_by_its_numbers() -> None:
    assert host_versions.findings(other(criu="4.10"), other(criu="4.9"), "h2")
    assert not host_versions.findings(other(criu="4.9"), other(criu="4.10"), "h2")
