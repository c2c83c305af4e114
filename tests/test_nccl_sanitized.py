# SPDX-License-Identifier: Apache-2.0
"""The interposer and the simulated CUDA and NCCL under the sanitizers, while programs are moved at
random moments."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from nccl_coordinator import TWO_DEVICES, World

SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


@pytest.fixture(scope="module", params=sorted(SANITIZERS))
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    flags = SANITIZERS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    found = subprocess.run(
        ["cc", *flags, "-o", folder / "empty", folder / "empty.c"], capture_output=True, text=True
    )
    if found.returncode != 0:
        pytest.skip(f"the compiler has no {request.param} sanitizer here: {found.stderr[:200]}")
    return World(folder, flags=flags)


@pytest.mark.parametrize(
    ("name", "steps", "begun"), [("train", "60", "step 1"), ("family", "80", "made")]
)
def test_nothing_is_found(
    sanitized: World, tmp_path: Path, name: str, steps: str, begun: str
) -> None:
    with sanitized.ranks(name, 2, tmp_path / "run", steps, SIMCUDA_DEVICES=TWO_DEVICES) as ranks:
        ranks.await_line(begun, 60)
        ranks.move(limit_s=20)
        ranks.move_until_the_end(1, limit_s=20)
        ranks.finish()  # a finding is an exit status of its own
        assert not [line for rank in range(2) for line in ranks.said(rank) if "Sanitizer" in line]
