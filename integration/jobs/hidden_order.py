# SPDX-License-Identifier: Apache-2.0
"""Three ranks with an order among them that no collective shows: a file that one waits for.

Rank 2 enters a collective with rank 1, which waits for a file of rank 0, which it writes after an
operation on a communicator of its own. Whoever holds rank 0 at that operation holds them all.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from steplog import StepLog, arguments, leave, place


def main() -> None:
    args = arguments().parse_args()

    rank, _ = place()
    dist.init_process_group("gloo")
    alone, pair = dist.new_group([0]), dist.new_group([1, 2], group_desc="pair")
    log = StepLog(args.out, rank)
    value = torch.full((4,), 1.0 + rank)
    for step in range(1, args.steps + 1):
        hidden = args.out / f"hidden{step}"
        if rank == 0:
            time.sleep(0.0 if log.hurried else args.pace)
            dist.all_reduce(value, group=alone)
            hidden.touch()
        if rank == 1:
            while not hidden.exists():
                time.sleep(0.001)
        if rank > 0:
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=pair)
        value += rank
        log.step(step, value.sum())
    dist.barrier()
    log.end([value], steps=args.steps)
    leave()


if __name__ == "__main__":
    main()
