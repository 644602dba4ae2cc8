"""A DDP training on GPUs, or on the CPU where there are none; from its fourth batch on, the last rank overflows."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from e2e.scripts.train import Square

BATCHES = 100
FAULT_AT = 3


@record
def main() -> None:
    has_device = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_device else torch.device("cpu")
    if has_device:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_device else "gloo")
    square = Square()
    inner = nn.Sequential(nn.Linear(8, 8), square, nn.Linear(8, 1)).to(device)
    model = DistributedDataParallel(inner, device_ids=[device.index] if has_device else None)
    optimizer = torch.optim.AdamW(model.parameters())
    with rankwatch.watch(model):
        for batch in range(BATCHES):
            if batch == FAULT_AT and dist.get_rank() == dist.get_world_size() - 1:
                square.gain = float("inf")
            model(torch.ones(4, 8, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
