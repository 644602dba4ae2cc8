"""A complete FSDP training under rankwatch: a small decoder, sharded block by block, learns the next byte of a text.

On one machine: rankwatch run -- torchrun --nproc-per-node 2 train_fsdp.py
On a cluster: deploy/slurm/train.sbatch, or deploy/kubernetes/pytorchjob.yaml. With --lr 1e30 it goes wrong, and you see a report.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import rankwatch

LENGTH, WIDTH, BATCH = 64, 64, 16


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        hidden = self.embedding(text) + self.positions
        for block in self.blocks:
            hidden = block(hidden, src_mask=future, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="the text to learn (default: this script)")
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    if on_gpus:  # a SLURM task may see only its own GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda" if on_gpus else "cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Decoder().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    text = torch.tensor(list(options.text.read_bytes()))
    torch.manual_seed(dist.get_rank())  # each rank reads other parts of the text
    with rankwatch.watch(model):  # the one line
        for step in range(options.steps):
            page = text[torch.randint(len(text) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)].to(device)
            loss = cross_entropy(model(page[:, :-1]).flatten(0, 1), page[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
