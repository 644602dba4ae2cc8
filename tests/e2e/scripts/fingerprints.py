"""Prints, as one JSON object, the fingerprints that each rank takes: ``fingerprints.py CASE ...``, on two ranks."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parents[2]))
from notebook import Notebook, unwatch, watched

CPU = torch.device("cpu")
Trained = tuple[Notebook, int]


def net() -> nn.Sequential:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)), nn.Linear(3, 1)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(100 * dist.get_rank() + step)
        model(torch.randn(4, 6)).pow(2).mean().backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def ddp() -> Notebook:
    model = DDP(net())
    _, notebook = watched(model)
    train(model, adam(model), 6)
    return notebook


def wrapped_later() -> Notebook:
    inner = net()
    _, notebook = watched(inner)
    model = DDP(inner)
    train(model, adam(model), 6)
    return notebook


def joined() -> Notebook:
    model = DDP(net())
    _, notebook = watched(model)
    optimizer = adam(model)
    for _ in range(2):
        with model.join():
            train(model, optimizer, 3 + 2 * dist.get_rank())
    train(model, optimizer, 2)
    return notebook


def without_sync() -> Notebook:
    model = DDP(net())
    _, notebook = watched(model)
    optimizer = adam(model)
    with model.no_sync():
        model(torch.randn(4, 6)).sum().backward()
    train(model, optimizer, 3)
    with model.no_sync():
        train(model, optimizer, 1)
    train(model, optimizer, 2)
    return notebook


def fsdp2() -> Notebook:
    model = net()
    for module in (model[0], model[2], model):
        fully_shard(module)
    _, notebook = watched(model)
    train(model, adam(model), 6)
    return notebook


def fsdp2_later_in_bfloat16() -> Notebook:
    model = net()
    _, notebook = watched(model)
    for module in (model[0], model[2], model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(model, adam(model), 6)
    return notebook


def hsdp_without_all_reduce() -> Notebook:
    model = net()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    _, notebook = watched(model)
    optimizer = adam(model)
    train(model, optimizer, 2)
    model.set_requires_all_reduce(False)  # type: ignore[operator]
    train(model, optimizer, 2)
    return notebook


def fsdp1(is_flat: bool = False) -> Notebook:
    model = net()
    model[2] = FSDP(model[2], device_id=CPU, use_orig_params=not is_flat)
    whole = FSDP(model, device_id=CPU, use_orig_params=not is_flat)
    _, notebook = watched(whole)
    train(whole, adam(whole), 6)
    return notebook


def fsdp1_flat() -> Notebook:
    return fsdp1(is_flat=True)


def told(notebook: Notebook) -> list[dict[str, object]]:
    assert not notebook.faults
    assert all(fingerprint.fits(table) for table, fingerprint in notebook.fingerprints)
    return [
        {
            **fingerprint._asdict(),
            "lanes": fingerprint.lanes.hex(),
            "gathers": fingerprint.gathers.hex(),
            "inputs": fingerprint.inputs.hex(),
            "sources": [mesh.source for mesh in table.meshes],
            "rows": [row.parameter for row in table.rows_of(fingerprint.slot)],
        }
        for table, fingerprint in notebook.fingerprints
    ]


def main(names: Iterable[str]) -> None:
    dist.init_process_group("gloo")
    found: dict[str, list[object]] = {}
    for name in names:
        of_ranks: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, told(globals()[name]()))
        found[name] = of_ranks
        unwatch()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
