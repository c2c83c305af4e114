# SPDX-License-Identifier: Apache-2.0
"""A cluster file that no person writes: refused in words, and in few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.errors import ConfigError
from liveshift.runtime.config.cluster import LIMIT, load, parse


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "{b = " * 2000, "nested too deeply"),
        ("[cluster]\nname = " + "[" * 900 + "]" * 900, "nested too deeply"),
        ("a = " + "9" * 5000, "correct TOML: Exceeds the limit"),
        ("[cluster]\nname = 0x" + "f" * 9000, "found a number with more than 4300 digits"),
        ("[timeouts]\nheartbeat = 0x" + "f" * 9000, "timeouts.heartbeat"),
    ],
)
def test_what_no_person_writes_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")) as caught:
        parse(text)
    assert len(str(caught.value)) < 1000


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"#" * (LIMIT + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        load(path)
