# SPDX-License-Identifier: Apache-2.0
"""A rank of the job whose steps are timed: DDP over gloo. Reads a number of steps per line, does
them, and writes the seconds that they took and the instructions; ends with its input."""

import os
import sys
import time

from user_instructions import UserInstructions

executed = UserInstructions()  # before torch starts threads

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
dist.init_process_group(
    "gloo",
    init_method="file://" + sys.argv[1],
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
torch.manual_seed(7)
layers = [torch.nn.Linear(192, 192) for _ in range(12)]  # several buckets: several all-reduces
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2)
optimiser = torch.optim.AdamW(model.parameters())
batch = torch.randn(32, 192)
print("ready", flush=True)
for line in sys.stdin:
    dist.barrier()
    began, before = time.perf_counter(), executed.read()
    for _ in range(int(line)):
        optimiser.zero_grad()
        model(batch).square().mean().backward()
        optimiser.step()
    print(time.perf_counter() - began, executed.read() - before, flush=True)
dist.destroy_process_group()
os._exit(0)  # torch may abort in its own teardown
