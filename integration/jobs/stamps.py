# SPDX-License-Identifier: Apache-2.0
"""Writes the number of the step into every page of its memory, and looks whether all pages have
that of the step before: one that is older has come from somewhere else.

The rest of each page is noise, which no compression shortens and which must stay as it is. A line
of the log tells how many pages were not as they had been left.
"""

import argparse
import json
import time
from pathlib import Path

import numpy

WORDS = 512  # of 8 bytes, in a page

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--megabytes", type=int, required=True)
parser.add_argument("--enough", type=Path, required=True, help="end when this file is there")
args = parser.parse_args()

chance = numpy.random.default_rng(1)
pages = chance.integers(0, 1 << 62, (args.megabytes * 256, WORDS), dtype=numpy.int64)
noise = pages.copy()
pages[:, 0] = step = 0
with (args.out / "rank0.jsonl").open("w", buffering=1) as log:
    while not args.enough.exists():
        wrong = int((pages[:, 0] != step).sum())
        step += 1
        pages[:, 0] = step
        log.write(json.dumps({"step": step, "time": time.time(), "wrong": wrong}) + "\n")
        time.sleep(0.01)
assert (pages[:, 1:] == noise[:, 1:]).all()
