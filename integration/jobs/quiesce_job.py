# SPDX-License-Identifier: Apache-2.0
"""A rank of the job that is brought to boundaries: DDP over gloo, and a group of every two ranks.
Trains until its input ends; prints "training" after the first steps, and its digest at last."""

import hashlib
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=size)
pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
torch.manual_seed(7)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8))), bucket_cap_mb=0.1
)
optimiser = torch.optim.AdamW(model.parameters())
batch, shared = torch.randn(16, 128), torch.ones(64)
ending = threading.Event()


def await_the_end() -> None:
    sys.stdin.read()
    ending.set()


threading.Thread(target=await_the_end, daemon=True).start()
steps, began = 0, time.perf_counter()
while True:
    enough = torch.tensor([float(ending.is_set())])
    dist.all_reduce(enough)  # all end after the same step
    if enough.item():
        break
    optimiser.zero_grad()
    model(batch).square().mean().backward()
    dist.all_reduce(shared, group=pairs[rank // 2])
    shared /= 2
    optimiser.step()
    steps += 1
    if steps == 5:
        print("training", flush=True)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(bytes(parameter.detach().view(torch.uint8).flatten().tolist()))
print(steps, time.perf_counter() - began, digest.hexdigest(), flush=True)
dist.destroy_process_group()
os._exit(0)  # torch may abort in its own teardown
