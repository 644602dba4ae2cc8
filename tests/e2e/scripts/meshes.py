"""Prints, as one JSON object, how the parameters of many models lie on the ranks: ``meshes.py [CASE ...]``.

Each case makes a model and calls it once. As its root is called, ``lay_out`` says how it lies; as its units are called, their
gathered values are read. Rank 0 prints what all ranks found.
"""

import dataclasses
import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from rankwatch.measure.modules import unwrap
from rankwatch.replicas.checksum import share_of, write_lanes
from rankwatch.replicas.meshes import Laid, LaidParameter, lay_out

try:
    import torch.distributed.fsdp as fsdp2

    fully_shard: Any = fsdp2.fully_shard
except AttributeError:  # torch 2.4 and 2.5
    import torch.distributed._composable.fsdp as fsdp2  # type: ignore[no-redef]

    fully_shard = fsdp2.fully_shard

BF16 = torch.bfloat16
S = ShardingStrategy


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(self.up(self.norm(x)).relu())
        return out


class Net(nn.Module):
    """``head`` and ``first`` have one weight. There are sizes that neither two nor four ranks divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 6)
        self.head.weight = self.first.weight
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(self.head(x))
        return out


class Mixed(nn.Module):
    """Experts of a rank's own, and the router before them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        out: Tensor = self.out(sum(shares[..., n : n + 1] * expert(x) for n, expert in enumerate(self.experts)))
        return out


class Seen:
    """What one rank finds as a model is called."""

    def __init__(self) -> None:
        self.laid: list[Laid] = []
        self.own: dict[str, tuple[list[int], int] | None] = {}
        self.gathered: dict[str, tuple[int, int, int]] = {}

    def look(self, root: nn.Module, args: Any) -> None:
        laid = lay_out(root, getattr(DDP, "_active_ddp_module", None), world(), slots=3)
        self.laid.append(laid)
        for one in (*laid.parameters, *laid.apart):
            values = one.own()
            self.own[one.row.parameter] = None if values is None else (lanes(values), values.numel())
            if one.gather is not None and one.gather.module is root:
                self.read(one)
            elif one.gather is not None:
                one.gather.module.register_forward_pre_hook(functools.partial(self.read, one))

    def read(self, one: LaidParameter, *_: Any) -> None:
        own, gather = one.own(), one.gather
        assert own is not None
        assert gather is not None
        share = torch.zeros(2, dtype=torch.int64)
        share_of(own.to(gather.dtype), gather.offset, share)
        whole = gather.find()
        if whole is not None:
            self.gathered[one.row.parameter] = int(share[0]), lanes(whole)[0], whole.numel()


def run(make: Callable[[], nn.Module], *, before: nn.Module | None = None) -> dict[str, Any]:
    """Calls the model that ``make`` makes. The last pre-hook of its root looks at it; with ``before``, the first one of that."""
    seen = Seen()
    if before is not None:
        before.register_forward_pre_hook(seen.look)
    model = make()
    if before is None:
        unwrap(model).register_forward_pre_hook(seen.look)
    torch.manual_seed(dist.get_rank())
    model(torch.rand(2, 6)).sum().backward()
    table = seen.laid[0].table
    table.check_parts()
    return {
        "rows": table.rows,
        "apart": [one.row.parameter for one in seen.laid[0].apart],
        "meshes": [dataclasses.astuple(mesh) for mesh in table.meshes],
        "inputs": table.inputs and dataclasses.astuple(table.inputs),
        "own": seen.own,
        "gathered": seen.gathered,
    }


def lanes(values: Tensor) -> list[int]:
    into = torch.zeros(2, dtype=torch.int64)
    write_lanes(values, into)
    return [int(lane) for lane in into]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def frozen() -> Net:
    model = net()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    return model


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "pp")[: len(shape)])


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    return model.get_submodule("blocks").children()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2: a unit for each block, and the root."""
    for block in blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def plan(model: nn.Module, tp: Any) -> nn.Module:
    for block in blocks(model):
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def flat(model: nn.Module, **options: Any) -> nn.Module:
    options.setdefault("use_orig_params", True)
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **options)


def before(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """The model is watched, then wrapped."""
    model = net()
    return run(lambda: wrap(model), before=model)


def ignoring() -> nn.Module:
    torch.manual_seed(0)
    model = Mixed()
    names = [name for name, _ in model.named_parameters() if not name.startswith("out")]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    return DDP(model)


def hooked(hook: Any, state: Any = None) -> nn.Module:
    model = DDP(net())
    model.register_comm_hook(state, hook)
    return model


def own_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def nested() -> nn.Module:
    model = net()
    model.blocks[0] = DDP(model.blocks[0])
    model.blocks[1] = FSDP(model.blocks[1], use_orig_params=True, device_id=torch.device("cpu"))
    return model


def lora() -> nn.Module:
    model = net()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.last.down = nn.Linear(6, 2, bias=False)
    model.last.register_forward_hook(lambda module, args, output: output + module.down(args[0]).sum())
    return model


def partial_sum() -> nn.Module:
    model = net()
    model.last.bias = nn.Parameter(DTensor.from_local(torch.ones(5), mesh(dist.get_world_size()), [Partial()]))
    model.last.register_forward_pre_hook(
        lambda module, args: setattr(module, "bias", nn.Parameter(module.bias.full_tensor()))
    )
    return model


def replicated() -> nn.Module:
    model = net()
    tp = mesh(dist.get_world_size())
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                module._parameters[name] = nn.Parameter(distribute_tensor(value.detach(), tp, [Replicate()]))
    model.register_forward_pre_hook(lambda module, args: (distribute_tensor(args[0], tp, [Replicate()]),))
    return model


def marked() -> nn.Module:
    model = net()
    model.last.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    model.last.bias.allreduce = False  # type: ignore[attr-defined]
    return model


def experts() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


def tp_then_dp() -> nn.Module:
    grid = mesh(2, 2)
    model = plan(net(), grid["tp"])
    return DDP(model, device_mesh=grid["dp"])


def tp_then_fsdp(**options: Any) -> nn.Module:
    grid = mesh(2, 2)
    return sharded(plan(net(), grid["tp"]), mesh=grid["dp"], **options)


def half() -> nn.Module:
    """DDP over pairs of ranks."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return DDP(net(), process_group=pairs[dist.get_rank() % 2])


def by_groups() -> nn.Module:
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    groups = inner[rank // 2], outer[rank % 2]
    return flat(net(), process_group=groups, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def ignored() -> nn.Module:
    model = net()
    return sharded(model, ignored_params={model.blocks[0].scale, model.last.bias})


class Attention(nn.Module):
    """The forward of ``inner.out_proj`` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x)[0]
        return out


def attention() -> nn.Module:
    torch.manual_seed(0)
    model = Attention()
    fully_shard(model.inner)
    return model  # the root is no unit


def grouped() -> nn.Module:
    model = net()
    fully_shard(list(model.blocks))
    fully_shard(model)
    return model


def checkpointed() -> nn.Module:
    model = net()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fully_shard(checkpoint_wrapper(block))
    fully_shard(model)
    return model


def composed() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(net())


def expert_parallel() -> nn.Module:
    """Each expert's weights are cut over pairs of ranks; all else is sharded over all ranks."""
    torch.manual_seed(0)
    model, grid = Mixed(), mesh(2, 2)
    for expert in model.experts:
        for name, value in list(expert.named_parameters()):
            expert._parameters[name] = nn.Parameter(distribute_tensor(value.detach(), grid["tp"], [Shard(0)]))
        expert.register_forward_pre_hook(lambda module, args: (distribute_tensor(args[0], grid["tp"], [Replicate()]),))
        expert.register_forward_hook(lambda module, args, output: output.full_tensor())
        fully_shard(expert, mesh=grid["dp"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


def world() -> int:
    return dist.get_world_size()


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: run(net),
    "ddp": lambda: run(lambda: DDP(net())),
    "ddp of a frozen part": lambda: run(lambda: DDP(frozen(), static_graph=True)),
    "replicate": lambda: run(composed),
    "ddp after watch": lambda: before(DDP),
    "ddp ignores": lambda: run(ignoring),
    "ddp powersgd": lambda: run(lambda: hooked(powerSGD_hook, PowerSGDState(None))),
    "ddp fp16 of allreduce": lambda: run(lambda: hooked(fp16_compress_wrapper(allreduce_hook))),
    "ddp fp16 of noop": lambda: run(lambda: hooked(fp16_compress_wrapper(noop_hook))),
    "ddp local sgd": lambda: run(lambda: hooked(post_localSGD_hook, PostLocalSGDState(None, None, 100))),
    "ddp own hook": lambda: run(lambda: hooked(own_hook)),
    "experts": lambda: run(experts),
    "marked": lambda: run(marked),
    "lora": lambda: run(lambda: DDP(lora())),
    "nested": lambda: run(nested),
    "dtensor replicate": lambda: run(replicated),
    "dtensor partial": lambda: run(partial_sum),
    "tp": lambda: run(lambda: plan(net(), mesh(world()))),
    "fsdp1": lambda: run(lambda: flat(net())),
    "fsdp1 flat": lambda: run(lambda: flat(net(), use_orig_params=False)),
    "fsdp1 after watch": lambda: before(flat),
    "fsdp1 grad op": lambda: run(lambda: flat(net(), sharding_strategy=S.SHARD_GRAD_OP)),
    "fsdp1 no shard": lambda: run(lambda: flat(net(), sharding_strategy=S.NO_SHARD)),
    "fsdp1 mixed": lambda: run(lambda: flat(net(), mixed_precision=MixedPrecision(param_dtype=BF16))),
    "fsdp1 frozen": lambda: run(lambda: flat(frozen())),
    "fsdp1 n by 1": lambda: run(lambda: flat(net(), device_mesh=mesh(world(), 1), sharding_strategy=S.HYBRID_SHARD)),
    "fsdp2": lambda: run(lambda: sharded(net())),
    "fsdp2 after watch": lambda: before(sharded),
    "fsdp2 frozen": lambda: run(lambda: sharded(frozen())),
    "fsdp2 mixed": lambda: run(lambda: sharded(net(), mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=BF16))),
    "fsdp2 offload": lambda: run(lambda: sharded(net(), offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=False))),
    "fsdp2 of an attention": lambda: run(attention),
    "fsdp2 of a group": lambda: run(grouped),
    "fsdp2 checkpointed": lambda: run(checkpointed),
    "fsdp2 kept": lambda: run(lambda: sharded(net(), reshard_after_forward=False)),
    "fsdp2 ignored": lambda: run(ignored),
    "fsdp2 columns": lambda: run(
        lambda: sharded(net(), shard_placement_fn=lambda one: Shard(1) if one.ndim == 2 and one.shape[1] == 12 else None)
    ),
    "fsdp2 n by 1": lambda: run(lambda: sharded(net(), mesh=mesh(world(), 1))),
    # On four ranks alone:
    "ddp of pairs": lambda: run(half),
    "ddp tp": lambda: run(tp_then_dp),
    "fsdp1 hybrid": lambda: run(lambda: flat(net(), device_mesh=mesh(2, 2), sharding_strategy=S.HYBRID_SHARD)),
    "fsdp1 hybrid by groups": lambda: run(by_groups),
    "fsdp2 resharded to two": lambda: run(lambda: sharded(net(), reshard_after_forward=2)),
    "fsdp2 expert parallel": lambda: run(expert_parallel),
    "fsdp2 hybrid": lambda: run(lambda: sharded(net(), mesh=mesh(2, 2))),
    "fsdp2 tp": lambda: run(tp_then_fsdp),
    "fsdp2 tp mixed": lambda: run(lambda: tp_then_fsdp(mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=BF16))),
}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    results: dict[str, list[Any]] = {}
    for name in sys.argv[1:] or CASES:
        found: list[Any] = [None] * world()
        dist.all_gather_object(found, CASES[name]())
        results[name] = found
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
