# SPDX-License-Identifier: Apache-2.0
"""Programs that steps start: each uses the GPU, or works on another that does, at a step's word.

They begin with ``say("ready")`` or figures, then answer line by line (child.py), and end with
their input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def heard() -> Iterator[Any]:
    for line in sys.stdin:
        yield json.loads(line)
