# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzing harness (tests/fuzz, `make fuzz`) over every parser.

Mutations of real encodings and all that was ever found, the same ones every time. The harness is
tested too: it must see what it is there for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

FUZZ = ROOT / "tests" / "fuzz"
RUNS = 12_000


def fuzz(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FUZZ), "--engine", "mutations", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_no_parser_breaks_on_what_comes_from_outside(tmp_path: Path) -> None:
    done = fuzz("--runs", str(RUNS), "--findings", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    table = [line.split() for line in done.stdout.splitlines()[1:]]
    every = {name: int(count.replace(",", "")) for name, count, *_ in table}
    assert every.pop("all") == sum(every.values()) > RUNS * 0.95
    assert all(every.values())
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


BROKEN = {
    "raises": "raise KeyError(data)",
    "hangs": "while True: pass",
    "hangs and takes every error for its own": (
        "\n    while True:\n        try:\n            while True: pass\n"
        "        except Exception: pass"
    ),
    "waits": "import os; os.read(os.pipe()[0], 1)",
    "takes memory": "bytearray(1 << 34)",
    "writes elsewhere": (
        "\n    (place.top / 'beside' / 'new').write_bytes(data)\n    place.check()"
    ),
    "changes what is elsewhere": (
        "\n    (place.top / 'beside' / 'file').chmod(0o4755)\n    place.check()"
    ),
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN.keys())
def test_the_harness_sees_what_it_is_there_for(tmp_path: Path, code: str) -> None:
    program = f"""
import sys
sys.path[:0] = [{str(FUZZ.parent)!r}, {str(FUZZ.parent / "support")!r}]
from pathlib import Path
from fuzz import engines, guard, targets
guard.SLOWEST_S, guard.LONGEST_S = 0.3, 1.0
place = guard.Place()
def run(data):
    if len(data) < 3: return
    {code}
target = targets.Target("broken", run, lambda: [b"seed"], places=[place])
engines.with_mutations(target, 100, 0, 1, Path({str(tmp_path)!r})).say()
target.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TMPDIR": str(tmp_path)},  # an Escape ends it before it can clear up
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (found,) = json.loads(done.stdout)["findings"]
    assert Path(found).parent == tmp_path / "broken"
    assert len(Path(found).read_bytes()) >= 3
