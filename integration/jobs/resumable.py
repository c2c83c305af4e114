# SPDX-License-Identifier: Apache-2.0
"""A DDP job that goes on from a checkpoint, as jobs are restarted today.

With ``--checkpoint`` rank 0 saves every ``--every`` steps, and all ranks begin from the file if it
is there. Without, it does nothing for the loss of a host.
"""

from __future__ import annotations

import os
from pathlib import Path

from shares import Share, open_log, options
from steplog import leave, rank_and_world


def main() -> None:
    parser = options()
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=100)
    args = parser.parse_args()
    rank, _ = rank_and_world()
    log = open_log(args.out, rank)

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    share = Share(args.size)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(share.net)
    optimizer = share.optimizer(model.parameters())
    first = 1
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        share.net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    for step in range(first, args.steps + 1):
        letters, following = share.rows(step, rank)
        loss = model(letters, following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.checkpoint and rank == 0 and step % args.every == 0:
            fresh = args.checkpoint.with_suffix(".new")
            state = {"model": share.net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step, **state}, fresh)
            os.replace(fresh, args.checkpoint)
        share.record(log, step, loss, rank, args.pace)
    log.end(share.net.parameters(), steps=step)
    leave()


if __name__ == "__main__":
    main()
