# SPDX-License-Identifier: Apache-2.0
"""Calls the driver's checkpoint functions on another process: ["Lock", pid] → result and seconds.

No resident helper of ours: for the bare driver's words, and for what a process per action costs.
"""

from __future__ import annotations

import ctypes
import time

from ..cuda import Library
from . import heard, say

LOCK_TIMEOUT_MS = 20_000
STATES = ("RUNNING", "LOCKED", "CHECKPOINTED", "FAILED")


def main() -> None:
    began = time.perf_counter()
    cu = Library("libcuda.so.1")
    cu.cuInit(0)
    say({"init_s": round(time.perf_counter() - began, 4)})
    for action, pid in heard():
        arguments = (ctypes.c_uint32 * 16)()
        arguments[0] = LOCK_TIMEOUT_MS if action == "Lock" else 0
        began = time.perf_counter()
        result = cu.code(f"cuCheckpointProcess{action}", pid, arguments)
        seconds = time.perf_counter() - began
        state = ctypes.c_int(-1)
        cu.code("cuCheckpointProcessGetState", pid, ctypes.byref(state))
        known = STATES[state.value] if 0 <= state.value < len(STATES) else str(state.value)
        say({"result": result, "s": round(seconds, 4), "state": known})


if __name__ == "__main__":
    main()
