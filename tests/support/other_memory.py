# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: liveshift loads the memory.so that LIVESHIFT_TEST_MEMORY names.

The product itself reads no such variable. This must be loaded before any test imports liveshift:
``python -m pytest -p other_memory``.
"""

from __future__ import annotations

import ctypes
import os

from liveshift.criu_glue.memory import engine

engine.LIBRARY = os.environ["LIVESHIFT_TEST_MEMORY"]

# cffi closes a library with the last object that uses it. ctypes never does: so the leak checker,
# which looks at the very end of the process, can name the functions of the library.
ctypes.CDLL(engine.LIBRARY)

# Only this process has the library. A process that tests start, to follow its memory, say, would
# have the sanitizer's shadow memory of some terabytes.
os.environ.pop("LD_PRELOAD", None)
