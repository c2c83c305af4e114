# SPDX-License-Identifier: Apache-2.0
"""DDP whose samples come from persistent DataLoader workers, shuffled anew in every epoch."""

import torch
import torch.distributed as dist
from steplog import StepLog, arguments, last_step, leave, place
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

EPOCH = 40  # steps


class Noise(Dataset[Tensor]):
    """Samples that depend on their index alone, made in a worker."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


def main() -> None:
    parser = arguments()
    parser.add_argument("--contexts", nargs="+", default=["fork"], help="one for each rank in turn")
    args = parser.parse_args()
    rank, world = place()
    dist.init_process_group("gloo")
    data = Noise(EPOCH * 8 * world)
    sampler: DistributedSampler[Tensor] = DistributedSampler(data, shuffle=True, seed=3)
    context = args.contexts[rank % len(args.contexts)]
    loader = DataLoader(
        data,
        batch_size=8,
        sampler=sampler,
        persistent_workers=True,
        num_workers=2 if context == "fork" else 1,  # each of the others imports all of this again
        generator=torch.Generator().manual_seed(rank),
        multiprocessing_context=context,
    )
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    log = StepLog(args.out, rank)
    step = epoch = 0
    while step < last_step(args):
        sampler.set_epoch(epoch)
        for x in loader:
            step += 1
            loss = (model(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(step, loss, args.pace, epoch=epoch)
            if step >= last_step(args):
                break
        epoch += 1
    log.end(net.parameters(), steps=step)
    leave()


if __name__ == "__main__":
    main()
