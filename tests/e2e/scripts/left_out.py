"""Trains each of some ways twice: with bad steps under ``on_bad_step="skip"``, and without these steps, left out by hand.

``left_out.py table THIRD`` goes through a third of ``ways``, from 0 on; ``left_out.py drawn FIRST COUNT`` through ways drawn at
random; ``left_out.py device`` through those on a GPU that all ranks share; ``left_out.py one NAME`` through one. Rank 0 prints a
line of JSON for each: how many steps each rank left out, and if weights, buffers and optimizer state are the same.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rankwatch

STEPS, WIDTH, ROWS = 8, 8, 6


@dataclass(frozen=True)
class Fault:
    """What goes bad: in which step and micro-batch, on which rank, and where."""

    step: int = 3
    micro: int = 0
    rank: int = 1
    place: str = "data"


@dataclass(frozen=True)
class Way:
    """A training. ``how``: ddp, fsdp1, fsdp2, hsdp, or by hand."""

    how: str = "ddp"
    optimizer: str = "adamw"
    micros: int = 1
    faults: tuple[Fault, ...] = (Fault(),)
    norms: bool = True
    checkpoints: str = ""
    clips: bool = False
    scales: bool = False
    autocasts: bool = False
    compiles: bool = False
    syncs: bool = False
    device: str = "cpu"
    """On a GPU norms are SyncBatchNorms. Ranks that share it use gloo: NCCL wants one for each."""


def ways_on(device: str) -> dict[str, Way]:
    found = {
        f"{how}-{place} on {device}": Way(how, faults=(Fault(place=place),)) for how in ("ddp", "hand") for place in PLACES
    }
    found["rank 0"] = Way(faults=(Fault(rank=0),))
    found["scaled"] = Way(scales=True, optimizer="fused")
    return {name: replace(way, device=device) for name, way in found.items()}


def ways() -> dict[str, Way]:
    found = {f"{how}-{place}": Way(how, faults=(Fault(place=place),)) for how in HOWS for place in PLACES}
    found |= {f"{how}-shard": Way(how, faults=(Fault(place="shard"),)) for how in ("fsdp1", "fsdp2", "hand")}
    found |= {f"optimizer-{name}": Way(optimizer=name) for name in OPTIMIZERS}
    found |= {f"fsdp2-{name}": Way("fsdp2", optimizer=name) for name in ("fused", "sgd", "counting")}
    found |= {f"micro-{micro}-{how}": Way(how, micros=3, faults=(Fault(micro=micro),)) for micro in range(3) for how in HOWS}
    found["rank 0"] = Way(faults=(Fault(rank=0),))
    found |= {f"clipped-{how}": Way(how, clips=True) for how in HOWS}
    found |= {f"checkpoint-{kind}": Way(checkpoints=kind) for kind in ("reentrant", "not reentrant")}
    found |= {"bf16": Way(autocasts=True), "scaled": Way(scales=True), "scaled-clipped": Way(scales=True, clips=True)}
    found |= {"scaled-fused": Way(scales=True, optimizer="fused"), "compiled": Way(compiles=True)}
    synced = [(how, place, rank) for how in HOWS for place in ("data", "forward") for rank in range(2)]
    found |= {
        f"sync-{how}-{place}-{rank}": Way(how, faults=(Fault(place=place, rank=rank),), syncs=True)
        for how, place, rank in synced
    }
    found |= {f"sync-micro-{how}": Way(how, micros=3, faults=(Fault(micro=1),), syncs=True) for how in HOWS}
    found["three"] = Way(faults=(Fault(1), Fault(3, place="loss"), Fault(4, rank=0, place="forward")))
    return found


HOWS = ("ddp", "fsdp1", "fsdp2", "hand")
PLACES = ("data", "forward", "loss", "backward")
OPTIMIZERS = ("adamw", "fused", "foreach", "sgd", "adafactor", "muon", "counting", "closure", "rmsprop", "nadam")


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, whether there are gradients or not, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * float("nan")


class _Synced(torch.autograd.Function):
    """What the kernels of torch's SyncBatchNorm do, which need a GPU. Sums of all ranks, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
        sums = torch.stack([x.sum(0), x.square().sum(0), torch.full_like(x[0], len(x))])
        dist.all_reduce(sums)
        rows = sums[2]
        mean = sums[0] / rows
        variance = sums[1] / rows - mean.square()
        norm.get_buffer("running_mean").lerp_(mean, 0.1)
        norm.get_buffer("running_var").lerp_(variance * rows / (rows - 1), 0.1)
        norm.get_buffer("num_batches_tracked").add_(1)
        scale = (variance + norm.eps).rsqrt()
        centred = (x - mean) * scale
        ctx.save_for_backward(centred, scale, rows)
        return centred

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        centred, scale, rows = ctx.saved_tensors
        sums = torch.stack([grads[0].sum(0), (grads[0] * centred).sum(0)])
        dist.all_reduce(sums)
        return scale * (grads[0] - sums[0] / rows - centred * sums[1] / rows), None


class SyncNorm(nn.BatchNorm1d):
    """Runs on CPUs. Of torch's own class DDP refuses a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        centred: Tensor = _Synced.apply(x, self)  # type: ignore[no-untyped-call]
        return centred * self.weight + self.bias


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.Identity() if norm is None else norm(WIDTH)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # a new tensor in the place of the buffer
        h = torch.relu(self.first(x))
        if self.fault == "forward":
            h = h / torch.zeros(1, device=h.device)
        if self.fault == "backward":
            h = _BadBackward.apply(h)  # type: ignore[no-untyped-call]
        found: Tensor = self.last(self.norm(h))
        return found


class Net(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        norm = SyncNorm if way.syncs else nn.BatchNorm1d if way.norms else None
        self.blocks = nn.ModuleList([Block(norm), Block(None)])
        self.checkpoints = way.checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpoints:
                x = checkpoint(block, x.requires_grad_(), use_reentrant=self.checkpoints == "reentrant")
            else:
                x = block(x)
        return x


def wrapped(net: nn.Module, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(net)
    if how == "hand":
        return net
    shape = (2, 2) if how == "hsdp" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    if how == "fsdp1":
        return FullyShardedDataParallel(net, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)
    from torch.distributed.fsdp import fully_shard  # torch 2.6

    for block in net.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def optimizers_of(name: str, parameters: Iterable[Tensor]) -> list[Any]:
    known = list(parameters)
    if name == "muon":
        flat = [one for one in known if one.ndim != 2]
        return [torch.optim.Muon([one for one in known if one.ndim == 2], lr=0.01), torch.optim.AdamW(flat, lr=0.01)]
    make: dict[str, Callable[[], Any]] = {
        "adamw": lambda: torch.optim.AdamW(known, lr=0.01),
        "closure": lambda: torch.optim.AdamW(known, lr=0.01),
        "fused": lambda: torch.optim.AdamW(known, lr=0.01, fused=True),
        "foreach": lambda: torch.optim.AdamW(known, lr=0.01, foreach=True, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(known, lr=0.01, momentum=0.9, weight_decay=0.1),
        "adafactor": lambda: torch.optim.Adafactor(known, lr=0.01),
        "counting": lambda: Counting(known, lr=0.01),
        "rmsprop": lambda: torch.optim.RMSprop(known, lr=0.01, momentum=0.9, centered=True),
        "nadam": lambda: torch.optim.NAdam(known, lr=0.01),
    }
    return [make[name]()]


def train(way: Way, *, skips: bool) -> tuple[list[bytes], int]:
    """What the training ends with, and how many steps this rank has said to leave out."""
    rank, bad = dist.get_rank(), {fault.step for fault in way.faults}
    torch.manual_seed(0)
    net = Net(way).to(way.device)
    if way.device == "cuda":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = wrapped(net, way.how)
    if way.compiles:
        model = torch.compile(model)
    optimizers = optimizers_of(way.optimizer, model.parameters())
    scaler = torch.amp.GradScaler(way.device, init_scale=64.0, growth_interval=1000) if way.scales else None
    said = Said()
    logging.getLogger("rankwatch").addHandler(said)
    watch = rankwatch.watch(model, on_bad_step=f"skip={STEPS - 1}/{STEPS}", capsule="off", closeup=0.5) if skips else None
    for step in range(STEPS):
        if not skips and step in bad:
            continue

        def backwards(step: int = step) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            for micro in range(way.micros):
                draw = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
                x, y = (torch.randn(ROWS, WIDTH, generator=draw).to(way.device) for _ in range(2))
                here = {fault.place for fault in way.faults if (fault.step, fault.micro, fault.rank) == (step, micro, rank)}
                net.blocks[1].fault = next(iter(here & {"forward", "backward"}), "") if skips else ""  # type: ignore[assignment]
                if "data" in here:
                    x[2, 1] = float("nan")
                is_last = micro == way.micros - 1
                waits = model.no_sync() if way.how == "ddp" and not is_last and not way.compiles else nullcontext()
                with waits:
                    with torch.autocast(way.device, dtype=torch.bfloat16, enabled=way.autocasts):
                        loss = (model(x) - y).square().mean() / way.micros
                    if "loss" in here:
                        loss = loss * torch.log(torch.tensor(-1.0, device=way.device))
                    (loss if scaler is None else scaler.scale(loss)).backward()
            if way.how == "hand":
                for value in net.parameters():
                    dist.all_reduce(value.grad)
            if any(fault.place == "shard" and (fault.step, fault.rank) == (step, rank) for fault in way.faults):
                spoil(model)
            if scaler is not None and way.clips:
                scaler.unscale_(optimizers[0])
            if way.clips and way.how == "fsdp1":
                model.clip_grad_norm_(0.1)
            elif way.clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        if way.optimizer == "closure":
            optimizers[0].step(backwards)
            continue
        backwards()
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    if watch is not None:
        watch.close()
    logging.getLogger("rankwatch").removeHandler(said)
    return [*map(bits_of, net.state_dict().values()), *states_of(optimizers)], said.count


def spoil(model: Any) -> None:
    """One number of this rank's shard of a gradient goes bad, after its reduction."""
    grad = next(value.grad for value in model.parameters() if value.grad is not None and local_of(value.grad).numel())
    local_of(grad).view(-1)[0] = float("nan")


def local_of(value: Any) -> Tensor:
    found: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found


class Said(logging.Handler):
    """Counts the steps that this rank has said to be left out."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "was left out" in record.getMessage()


def states_of(optimizers: list[Any]) -> list[bytes]:
    states = [value for optimizer in optimizers for one in optimizer.state.values() for value in one.values()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    plain = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return [*[bits_of(value) for value in states], repr(plain).encode()]


def bits_of(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    return local_of(value).detach().contiguous().view(-1).cpu().numpy().tobytes()


def drawn(seed: int) -> Way:
    """A way with one to three bad steps, each with one or two faults; the last step is good.

    So is the first one of several ranks: after it, DDP orders its buckets anew, and three numbers are added in another order.
    """
    draw, ranks = random.Random(seed), dist.get_world_size()
    micros = draw.randint(1, 3)
    steps = draw.sample(range(1 if ranks > 2 else 0, STEPS - 1), draw.randint(1, 3))
    faults = [
        Fault(step, draw.randrange(micros), draw.randrange(ranks), draw.choice(PLACES))
        for step in steps
        for _ in range(draw.randint(1, 2))
    ]
    hows = (*HOWS, "hsdp") if ranks == 4 else HOWS
    way = Way(draw.choice(hows), draw.choice(("adamw", "fused", "sgd", "counting")), micros, tuple(faults))
    return replace(way, clips=draw.random() < 0.3, norms=draw.random() < 0.6)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("rankwatch").propagate = False
    dist.init_process_group("gloo")
    if sys.argv[1] == "one":
        tried = {sys.argv[2]: ways()[sys.argv[2]]}
    elif sys.argv[1] == "device":
        tried = ways_on("cuda" if torch.cuda.is_available() else "cpu")
    elif sys.argv[1] == "table":
        tried = ways()
        if dist.get_world_size() == 2:  # see ``drawn``
            tried["the first step"] = Way(faults=(Fault(step=0),))
        if dist.get_world_size() == 4:
            tried |= {f"hsdp-{place}": Way("hsdp", faults=(Fault(place=place, rank=3),)) for place in PLACES}
        tried = dict(list(tried.items())[int(sys.argv[2]) :: 3])
    else:
        first, count = int(sys.argv[2]), int(sys.argv[3])
        tried = {f"seed {seed}": drawn(seed) for seed in range(first, first + count)}
    for name, way in tried.items():
        expected, _ = train(way, skips=False)
        found, count = train(way, skips=True)
        both: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(both, (expected == found, count))
        if dist.get_rank() == 0:
            line = {
                "name": name,
                "same": [same for same, _ in both],
                "left_out": [count for _, count in both],
                "way": repr(way),
            }
            print("left out", json.dumps(line), flush=True)
    dist.destroy_process_group()
    # As it takes its threads down, torch may abort: on a busy machine 1 of 70 processes that use gloo, without a watch too.
    os._exit(0)


if __name__ == "__main__":
    main()
