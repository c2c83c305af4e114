# SPDX-License-Identifier: Apache-2.0
"""Prints numbered lines, on both streams, some in two writes, some long; ends as it is told."""

import argparse
import os
import signal
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--lines", type=int, default=10**9)
parser.add_argument("--pace", type=float, default=0.005)
parser.add_argument("--code", type=int, default=0)
parser.add_argument("--die", type=int, default=0, help="end by this signal")
parser.add_argument("--polite", action="store_true", help="end by a signal with code 40 + it")
args = parser.parse_args()

capsule = os.environ.get("LIVESHIFT_CAPSULE", "-")


asked: list[int] = []


def end(signum: int, _frame: object) -> None:
    asked.append(signum)


if args.polite:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
for number in range(args.lines):
    tail = "x" * (number % 97)
    sys.stdout.write(f"out {number} {tail}")
    if number % 10 == 0:  # a line that is not whole for a moment
        sys.stdout.flush()
        time.sleep(args.pace)
    sys.stdout.write(".\n")
    sys.stdout.flush()
    sys.stderr.write(f"err {number}.\n")
    sys.stderr.flush()
    time.sleep(args.pace)
    if asked:
        print(f"{capsule} got {signal.Signals(asked[0]).name}", flush=True)
        sys.exit(40 + asked[0])
if args.die:
    os.kill(os.getpid(), args.die)
sys.exit(args.code)
