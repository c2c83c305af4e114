# SPDX-License-Identifier: Apache-2.0
"""Runs one kernel for as many seconds as the step says, and answers with the seconds that it took,
or with the error. It needs torch with CUDA.
"""

from __future__ import annotations

import time
from typing import Any

from . import heard, say

TRIED = 20_000_000
"""Cycles of the kernel that shows how many of them take a second."""


def main() -> None:
    import torch

    def spin(cycles: int) -> float:
        began = time.perf_counter()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def told(seconds: float) -> dict[str, Any]:
        try:
            return {"s": round(spin(round(seconds * a_second)), 3)}
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}

    spin(TRIED)
    a_second = TRIED / spin(TRIED)
    say("ready")
    for seconds in heard():
        say(told(seconds))


if __name__ == "__main__":
    main()
