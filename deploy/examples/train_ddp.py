"""A complete DDP training under rankwatch: data for each rank, checkpoints, and resuming after a requeue.

On one machine: rankwatch run -- torchrun --nproc-per-node 2 train_ddp.py
On a cluster: deploy/slurm/train.sbatch, or deploy/kubernetes/pytorchjob.yaml. With --lr 1e30 it goes wrong, and you see a report.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankwatch


def dataset() -> TensorDataset:
    """The largest of eight numbers, to be learned. Replace it by your dataset."""
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.amax(dim=1, keepdim=True))


def save(path: Path, **state: object) -> None:
    """Replaces the checkpoint atomically: a job that is killed while it writes leaves the earlier one."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    if on_gpus:  # a SLURM task may see only its own GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda" if on_gpus else "cpu")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    begin = 0
    if options.checkpoint.exists():
        state = torch.load(options.checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epochs"]
    dist.barrier()  # all ranks have read the checkpoint before rank 0 writes the next one

    data = dataset()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    batches = DataLoader(data, batch_size=64, sampler=sampler)
    with rankwatch.watch(model):  # the one line
        for epoch in range(begin, options.epochs):
            sampler.set_epoch(epoch)
            for x, y in batches:
                loss = mse_loss(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
                save(options.checkpoint, model=network.state_dict(), optimizer=optimizer.state_dict(), epochs=epoch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
