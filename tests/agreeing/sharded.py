"""FSDP1, FSDP2 and HSDP."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import rankwatch

from .case import ANY, Net, Step, draw, healthy, loss_of, own_seed, reduce_gradients, same_seed, trained

# --- FSDP1 --------------------------------------------------------------------------------------------------------------


def alike() -> Any:
    same_seed()
    net = Net()
    own_seed()
    return net


def flat(net: nn.Module | None = None, **options: Any) -> FullyShardedDataParallel:
    warnings.simplefilter("ignore")
    options = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "use_orig_params": True, **options}
    return FullyShardedDataParallel(net or alike(), device_id=torch.device("cpu"), **options)


@healthy(compared=ANY)
def fsdp1() -> Step:
    return trained(flat())


@healthy(compared=ANY)
def fsdp1_flat() -> Step:
    return trained(flat(use_orig_params=False))


@healthy(compared=ANY)
def fsdp1_whole() -> Step:
    """One unit."""
    return trained(flat(auto_wrap_policy=None))


@healthy(compared=ANY)
def fsdp1_gathered_until_the_backward() -> Step:
    return trained(flat(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


@healthy(compared=6)
def fsdp1_without_shards() -> Step:
    return trained(flat(sharding_strategy=ShardingStrategy.NO_SHARD))


@healthy(compared=6, ranks=4)
def fsdp1_hybrid() -> Step:
    mesh = init_device_mesh("cpu", (2, 2))
    return trained(flat(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh))


@healthy(compared=6, ranks=4)
def fsdp1_hybrid_by_groups() -> Step:
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = (shards[rank // 2], replicas[rank % 2])
    return trained(flat(sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, process_group=groups))


@healthy(compared=ANY)
def fsdp1_mixed_precision() -> Step:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = flat(mixed_precision=precision)
    return trained(model, lambda n: loss_of(model).float())


@healthy(compared=ANY)
def fsdp1_ignored_modules() -> Step:
    """The head is not sharded; the training reduces its gradients itself."""
    net = alike()
    model = flat(net, ignored_modules=[net.head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return trained(model, optimizer=optimizer, between=lambda: reduce_gradients(net.head.parameters()))


@healthy(compared=ANY)
def fsdp1_accumulation() -> Step:
    model = flat()
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@healthy(compared=ANY)
def fsdp1_frozen() -> Step:
    net = alike()
    net.first.requires_grad_(False)
    return trained(flat(net))


@healthy(compared=ANY)
def fsdp1_saved_and_loaded() -> Step:
    """Gathers the whole weights each 50 steps, evaluates with them, and goes back to them once."""
    model = flat()
    kept: dict[str, Any] = {}

    def after(number: int) -> None:
        if number % 50 == 49:
            with FullyShardedDataParallel.summon_full_params(model):
                pass
            model.eval()
            with torch.no_grad():
                model(draw()[0])
            model.train()
        if number == 60:
            kept.update({name: value.clone() for name, value in model.state_dict().items()})
        if number == 90:
            model.load_state_dict(kept)

    return trained(model, after=after)


# --- FSDP2 --------------------------------------------------------------------------------------------------------------


def fully(net: Any = None, mesh: Any = None, **options: Any) -> Any:
    """Shards a model that all ranks draw alike."""
    from torch.distributed.fsdp import fully_shard

    net = net or alike()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (net.first, net.second, net.head, net):
        fully_shard(module, mesh=mesh, **options)
    return net


@healthy(compared=ANY)
def fsdp2() -> Step:
    return trained(fully())


@healthy(compared=ANY, ranks=3)
def fsdp2_of_uneven_shards() -> Step:
    """8 rows over 3 ranks, 4 rows over 3: the last rank has nothing of the head's bias."""
    return trained(fully())


@healthy(compared=ANY)
def fsdp2_of_seeds_of_their_own() -> Step:
    """Each rank keeps its shard of what it drew itself: together they are one model."""
    return trained(fully(Net()))


@healthy(compared=ANY)
def fsdp2_from_the_meta_device() -> Step:
    with torch.device("meta"):
        net = Net()
    model = fully(net)
    model.to_empty(device="cpu")
    for part in (model.first, model.second, model.head):
        part.reset_parameters()
    return trained(model)


@healthy(compared=ANY)
def fsdp2_gathered_until_the_backward() -> Step:
    return trained(fully(reshard_after_forward=False))


@healthy(compared=ANY)
def fsdp2_mixed_precision() -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = fully(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return trained(model, lambda n: loss_of(model).float())


@healthy(compared=ANY)
def fsdp2_offloaded() -> Step:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return trained(fully(offload_policy=CPUOffloadPolicy(pin_memory=False)))


@healthy(compared=6, ranks=4)
def hsdp() -> Step:
    return trained(fully(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))


@healthy(compared=6)
def hsdp_of_single_ranks() -> Step:
    """Two replicas of one shard each."""
    return trained(fully(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))))


@healthy(compared=6, ranks=4)
def hsdp_mixed_precision() -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    return trained(model, lambda n: loss_of(model).float())


@healthy(compared=6, ranks=4)
def hsdp_accumulation() -> Step:
    """Reduces over the shards only, and over the replicas in the last of three backwards."""
    model = fully(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        for batch in range(3):
            model.set_requires_all_reduce(batch == 2)
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@healthy(compared=ANY)
def fsdp2_accumulation() -> Step:
    model = fully()
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        for batch in range(3):
            model.set_requires_gradient_sync(batch == 2)
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@healthy(compared=ANY)
def fsdp2_optimizer_in_backward() -> Step:
    model = fully()
    rankwatch.watch(model)
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def stepped(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)

    def step(number: int) -> None:
        loss_of(model).backward()

    return step


@healthy(compared=ANY)
def fsdp2_of_the_root_only() -> Step:
    from torch.distributed.fsdp import fully_shard

    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return trained(net)


@healthy(compared=ANY)
def fsdp2_of_a_part() -> Step:
    """The blocks are sharded, the head is not, and the training reduces its gradients itself."""
    from torch.distributed.fsdp import fully_shard

    net = alike()
    mesh = init_device_mesh("cpu", (2,))
    for part in (net.first, net.second):
        fully_shard(part, mesh=mesh)
    rankwatch.watch(net)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (net.first, net.second, net.head)]

    def step(number: int) -> None:
        loss_of(net).backward()
        for parameter in net.head.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


@healthy(compared=ANY)
def fsdp2_scaler_that_skips() -> Step:
    model = fully()
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=20)

    def step(number: int) -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@healthy(compared=ANY)
def fsdp2_tied() -> Step:
    from torch.distributed.fsdp import fully_shard

    from .wrapped import Tied

    net = Tied()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net.middle, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def loss(number: int) -> Tensor:
        words = torch.randint(50, (16,))
        return nn.functional.cross_entropy(net(words), (words + 1) % 50)

    return trained(net, loss)


@healthy(compared=ANY)
def fsdp2_saved_and_loaded() -> Step:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = fully()
    kept: dict[str, Any] = {}

    def after(number: int) -> None:
        if number == 60:
            state: dict[str, Any] = get_model_state_dict(model)
            kept.update({name: value.clone() for name, value in state.items()})
        if number == 90:
            set_model_state_dict(model, dict(kept))
        if number % 50 == 49:
            with torch.no_grad():
                model(draw()[0])

    return trained(model, after=after)


@healthy(compared=0)
def fsdp2_compiled() -> Step:
    """Each shard exists once, and what is gathered within a graph is not seen."""
    model: Any = torch.compile(fully(), backend="aot_eager")
    return trained(model)
