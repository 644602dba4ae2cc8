"""A half of a training, ``resumed.py FOLDER``: of four ranks as two replicas of two shards; then of two ranks without replicas,
or of one. The weights and the optimizer go through a distributed checkpoint."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankwatch

STEPS = 100


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, ranks = Path(sys.argv[1]), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    watch = rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if folder.exists():
        load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        watch.optimizer_step = STEPS
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(4, 8)
        (model(x) - x[:, :4].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
