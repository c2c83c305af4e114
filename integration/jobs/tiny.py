# SPDX-License-Identifier: Apache-2.0
"""A very small DDP job that goes on until a file says that it is enough.

Its parameters' digest is in every line, so that a run that was stopped at any step can be held
against one that went further. All ranks stop at the same step: rank 0 looks, the others are told.
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from steplog import StepLog, arguments, digest, leave, place
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = arguments()
    parser.add_argument("--enough", type=Path, help="stop when this file is there")
    parser.add_argument("--fail", type=Path, help="rank 1 ends with code 3 once this file is there")
    parser.add_argument("--kill-at", type=int, help="rank 1 kills itself (SIGKILL) at this step")
    parser.add_argument("--say", action="store_true", help="print each step")
    args = parser.parse_args()

    rank, world = place()
    if world > 1:
        dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = StepLog(args.out, rank)
    print(f"rank {rank} of {world} begins", flush=True)
    for step in range(1, args.steps + 1):
        if rank == 1 and args.fail is not None and args.fail.exists():
            raise SystemExit(3)
        if rank == 1 and step == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        chance = torch.Generator().manual_seed((rank << 20) + step)
        x = torch.randn(16, 32, generator=chance)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        uid = os.getuid()
        log.step(step, loss, args.pace, uid=uid, sha256=digest(net.parameters()))
        if args.say:
            print(f"step {step}", flush=True)
        enough = torch.tensor(int(rank == 0 and args.enough is not None and args.enough.exists()))
        if world > 1:
            dist.all_reduce(enough)
        if enough.item():
            break
    log.end(net.parameters(), steps=step)
    print(f"rank {rank} ends", flush=True)
    leave()


if __name__ == "__main__":
    main()
