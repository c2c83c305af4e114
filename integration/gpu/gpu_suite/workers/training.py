# SPDX-License-Identifier: Apache-2.0
"""Training steps at a word: [STEPS] → seconds for them.

With torch where it has CUDA: jobs/gpt.py's model, bf16 and AdamW, its gradients summed by NCCL over
a group of one. Else, on the doubles, what such a step asks of CUDA and NCCL, by ctypes: copies,
all-reduces, a short allocation.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable

from ..cuda import SIZE, TO_DEVICE, TO_HOST, Library
from . import heard, say

BATCH = 8
GRADIENTS, BYTES = 6, 4 << 20


def by_torch() -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    from ..jobs import gpt

    torch.manual_seed(7)
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),  # type: ignore[attr-defined]  # torch does not declare it
        rank=0,
        world_size=1,
        device_id=torch.device("cuda:0"),
    )
    model = gpt.wrapped(gpt.GPT().cuda().bfloat16(), "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens, wanted = gpt.batch(0, 1, BATCH)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, wanted).backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


def by_runtime() -> Callable[[], None]:
    from .reduce import FLOAT32, SUM, UniqueId

    cuda, nccl = Library("libcudart.so.13"), Library("libnccl.so.2")
    cuda.cudaSetDevice(0)
    chosen, comm, stream = UniqueId(), ctypes.c_void_p(), ctypes.c_void_p()
    nccl.ncclGetUniqueId(ctypes.byref(chosen))
    nccl.ncclCommInitRank(ctypes.byref(comm), 1, chosen, 0)
    cuda.cudaStreamCreate(ctypes.byref(stream))
    held = [ctypes.c_void_p() for _ in range(GRADIENTS)]
    for pointer in held:
        cuda.cudaMalloc(ctypes.byref(pointer), SIZE(BYTES))
    host = ctypes.create_string_buffer(BYTES)

    def step() -> None:
        short = ctypes.c_void_p()
        cuda.cudaMalloc(ctypes.byref(short), SIZE(1 << 20))
        for pointer in held:
            cuda.cudaMemcpyAsync(pointer, host, SIZE(BYTES), TO_DEVICE, stream)
            nccl.ncclAllReduce(pointer, pointer, SIZE(BYTES // 4), FLOAT32, SUM, comm, stream)
            cuda.cudaMemcpyAsync(host, pointer, SIZE(BYTES), TO_HOST, stream)
        cuda.cudaStreamSynchronize(stream)
        cuda.cudaFree(short)

    return step


def main() -> None:
    step = by_torch() if sys.argv[1] == "torch" else by_runtime()
    for _ in range(3):
        step()
    say("ready")
    for count in heard():
        began = time.perf_counter()
        for _ in range(count):
            step()
        say(time.perf_counter() - began)
    os._exit(0)  # torch may hang in its own teardown


if __name__ == "__main__":
    main()
