# SPDX-License-Identifier: Apache-2.0
"""FSDP2: every layer's parameters are shards on a mesh of CPUs, gathered when they are needed."""

import torch
import torch.distributed as dist
from steplog import StepLog, arguments, last_step, leave, place
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def main() -> None:
    args = arguments().parse_args()

    rank, world = place()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    layers = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(96, 96))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert all(isinstance(p, DTensor) for p in model.parameters())

    log = StepLog(args.out, rank)
    for step in range(1, args.steps + 1):
        chance = torch.Generator().manual_seed((rank << 20) + step)
        x = torch.randn(16, 96, generator=chance)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(step, loss, args.pace)
        if step >= last_step(args):
            break
    full = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    log.end(full, steps=step)
    leave()


if __name__ == "__main__":
    main()
