# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute for long and meet seldom: one collective before the first step, one after the
last, as in gradient accumulation over many batches."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from steplog import StepLog, arguments, leave, place


def main() -> None:
    args = arguments().parse_args()

    rank, _ = place()
    dist.init_process_group("gloo")
    log = StepLog(args.out, rank)
    value = torch.full((4,), 1.0 + rank)
    dist.all_reduce(value)
    for step in range(1, args.steps + 1):
        until = time.monotonic() + args.pace
        value = value * 1.001 + rank
        while time.monotonic() < until and not log.hurried:
            torch.rand(64, 64) @ torch.rand(64, 64)
        log.step(step, value.sum())
    dist.all_reduce(value)
    log.end([value], steps=args.steps)
    leave()


if __name__ == "__main__":
    main()
