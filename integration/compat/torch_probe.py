# SPDX-License-Identifier: Apache-2.0
"""A rank of a small job over gloo, in whatever world has torch; prints one JSON object."""

import hashlib
import json
import os
import sys
from datetime import timedelta

try:
    import torch
    import torch.distributed as dist
except (ImportError, OSError) as error:
    json.dump({"torch": None, "why": str(error)}, sys.stdout)
    sys.exit(0)

STEPS = 20

rank = int(os.environ["RANK"])
dist.init_process_group(
    "gloo",
    init_method="file://" + sys.argv[1],
    rank=rank,
    world_size=2,
    timeout=timedelta(seconds=120),
)
torch.manual_seed(7)
model: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
)
model = torch.nn.parallel.DistributedDataParallel(model)
optimiser = torch.optim.AdamW(model.parameters())
torch.manual_seed(100 + rank)
for _ in range(STEPS):
    optimiser.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimiser.step()
dist.barrier()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(bytes(parameter.detach().contiguous().view(torch.uint8).flatten().tolist()))
dist.destroy_process_group()
print()
json.dump(
    {
        "torch": str(torch.__version__),
        "pid": os.getpid(),
        "steps": STEPS,
        "python": ".".join(map(str, sys.version_info[:3])),
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        "parameters": digest.hexdigest(),
    },
    sys.stdout,
)
sys.stdout.flush()
os._exit(0)  # torch may abort in its own teardown
