# SPDX-License-Identifier: Apache-2.0
"""Appends numbered lines to one file that all capsules of the job share, some hundred a second."""

import argparse
import os
import time
from itertools import count
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--enough", type=Path, required=True, help="end when this file is there")
args = parser.parse_args()

rank = os.environ["LIVESHIFT_CAPSULE"].rpartition("/")[2]
log = os.open(args.out / "common.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
for number in count():
    if args.enough.exists():
        break
    os.write(log, f"{rank} {number}\n".encode())
    time.sleep(0.001)
