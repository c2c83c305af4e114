# SPDX-License-Identifier: Apache-2.0
"""The process whose memory is sent: ``python subject.py BYTES``; it ends with its standard input.

No two pages are alike, none is zero, and zstd finds nothing in them.
"""

import mmap
import os
import sys

BLOCK = 1 << 20
PAGE = 4096

size = int(sys.argv[1])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
noise = os.urandom(BLOCK)
for at in range(0, size, BLOCK):
    memory[at : at + BLOCK] = noise
for at in range(0, size, PAGE):
    memory[at : at + 8] = at.to_bytes(8, "little")
print("ready", flush=True)
sys.stdin.read()
