"""FSDP1, FSDP2 and HSDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from notebook import learn, take_step
from recorded.truths import ANY
from trainings.case import Training
from trainings.ranks import Net, alike, draw, flat, fully, loss_of, reduce_gradients, taught
from trainings.truths import agreeing

# --- FSDP1 --------------------------------------------------------------------------------------------------------------


agreeing(compared=ANY).each(
    fsdp1=lambda: taught(flat()),
    fsdp1_flat=lambda: taught(flat(use_orig_params=False)),
    # One unit.
    fsdp1_whole=lambda: taught(flat(auto_wrap_policy=None)),
    fsdp1_gathered_until_the_backward=lambda: taught(flat(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)),
)


@agreeing(compared=6)
def fsdp1_without_shards() -> Training:
    return taught(flat(sharding_strategy=ShardingStrategy.NO_SHARD))


@agreeing(compared=6, ranks=4)
def fsdp1_hybrid() -> Training:
    mesh = init_device_mesh("cpu", (2, 2))
    return taught(flat(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh))


@agreeing(compared=6, ranks=4)
def fsdp1_hybrid_by_groups() -> Training:
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = (shards[rank // 2], replicas[rank % 2])
    return taught(flat(sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, process_group=groups))


@agreeing(compared=ANY)
def fsdp1_mixed_precision() -> Training:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = flat(mixed_precision=precision)
    return taught(model, lambda n: loss_of(model).float())


@agreeing(compared=ANY)
def fsdp1_ignored_modules() -> Training:
    """The head is not sharded; the training reduces its gradients itself."""
    net = alike()
    model = flat(net, ignored_modules=[net.head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return taught(model, optimizer=optimizer, between=lambda n: reduce_gradients(net.head.parameters()))


@agreeing(compared=ANY)
def fsdp1_accumulation() -> Training:
    model = flat()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        with model.no_sync():
            loss_of(model).backward()
        learn(loss_of(model), optimizer)

    return Training(model, step)


@agreeing(compared=ANY)
def fsdp1_frozen() -> Training:
    net = alike()
    net.first.requires_grad_(False)
    return taught(flat(net))


@agreeing(compared=ANY)
def fsdp1_saved_and_loaded() -> Training:
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

    return taught(model, after=after)


# --- FSDP2 --------------------------------------------------------------------------------------------------------------


agreeing(compared=ANY).each(
    fsdp2=lambda: taught(fully()),
    # Each rank keeps its shard of what it drew itself: together they are one model.
    fsdp2_of_seeds_of_their_own=lambda: taught(fully(Net())),
    fsdp2_gathered_until_the_backward=lambda: taught(fully(reshard_after_forward=False)),
    fsdp2_scaler_that_skips=lambda: taught(
        fully(), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=20)
    ),
)
# 8 rows over 3 ranks, 4 rows over 3: the last rank has nothing of the head's bias.
agreeing(compared=ANY, ranks=3).each(fsdp2_of_uneven_shards=lambda: taught(fully()))


@agreeing(compared=ANY)
def fsdp2_from_the_meta_device() -> Training:
    with torch.device("meta"):
        net = Net()
    model = fully(net)
    model.to_empty(device="cpu")
    for part in (model.first, model.second, model.head):
        part.reset_parameters()
    return taught(model)


class Remembering(nn.Module):
    """Its buffers differ between ranks by right, but for the angles."""

    angles: Tensor
    drawn: Tensor
    rank: Tensor
    part: Tensor
    last: Tensor
    mean: Tensor
    scratch: Tensor
    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        self.register_buffer("angles", torch.linspace(0.1, 1.0, 8), persistent=False)
        self.register_buffer("drawn", torch.rand(8))
        self.register_buffer("rank", torch.tensor(rank), persistent=False)
        self.register_buffer("part", torch.zeros(8).copy_(torch.rand(8)), persistent=False)
        self.register_buffer("last", torch.zeros(8), persistent=False)
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("scratch", torch.rand(8), persistent=False)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().mean(0)
        self.mean.data.mul_(0.9).add_(self.last, alpha=0.1)
        self.scratch.copy_(self.last)
        self.mask = torch.full((len(x),), 1.0 + dist.get_rank())
        return x + self.angles.sin() + 0.01 * (self.mean + self.scratch + self.part + self.drawn + self.rank)


def remembering(wrapped: Callable[[Net], Any]) -> Training:
    """Half way through, the model gets another part: all is laid out anew."""
    net = alike()
    net.norm = Remembering()

    def after(number: int) -> None:
        if number == 60:
            net.second = nn.Sequential(net.second, nn.Identity())

    return taught(wrapped(net), after=after)


agreeing(compared=ANY).each(
    fsdp2_with_buffers_of_its_own=lambda: remembering(fully),
    fsdp1_with_buffers_of_its_own=lambda: remembering(flat),
)
agreeing(compared=8).each(
    ddp_with_buffers_of_its_own=lambda: remembering(lambda net: DistributedDataParallel(net, broadcast_buffers=False)),
    ddp_that_hands_buffers_on=lambda: remembering(DistributedDataParallel),
)


@agreeing(compared=ANY)
def fsdp2_watched_before_it_is_wrapped() -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    net = alike()
    rankwatch.watch(net)
    model = fully(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return replace(taught(model, lambda n: loss_of(model).float()), is_watched=True)


@agreeing(compared=ANY)
def fsdp2_mixed_precision() -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = fully(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return taught(model, lambda n: loss_of(model).float())


@agreeing(compared=ANY)
def fsdp2_offloaded() -> Training:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return taught(fully(offload_policy=CPUOffloadPolicy(pin_memory=False)))


def hybrid(shards: int) -> DeviceMesh:
    """Two replicas."""
    return init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))


agreeing(compared=6, ranks=4).each(hsdp=lambda: taught(fully(mesh=hybrid(2))))
agreeing(compared=6).each(hsdp_of_single_ranks=lambda: taught(fully(mesh=hybrid(1))))


@agreeing(compared=6, ranks=4)
def hsdp_mixed_precision() -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = fully(mesh=hybrid(2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    return taught(model, lambda n: loss_of(model).float())


def accumulated(model: Any, reduces: Callable[[bool], object]) -> Training:
    """Only the last of three backwards ``reduces`` all that is to be reduced."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        for batch in range(3):
            reduces(batch == 2)
            loss_of(model).backward()
        take_step(optimizer)

    return Training(model, step)


@agreeing(compared=6, ranks=4)
def hsdp_accumulation() -> Training:
    """Reduces over the shards only, and over the replicas in the last of three backwards."""
    model = fully(mesh=hybrid(2))
    return accumulated(model, model.set_requires_all_reduce)


@agreeing(compared=ANY)
def fsdp2_accumulation() -> Training:
    model = fully()
    return accumulated(model, model.set_requires_gradient_sync)


@agreeing(compared=ANY)
def fsdp2_optimizer_in_backward() -> Training:
    model = fully()
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def stepped(parameter: Tensor) -> None:
        take_step(optimizers[parameter])

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)

    def step(number: int) -> None:
        loss_of(model).backward()

    return Training(model, step)


@agreeing(compared=ANY)
def fsdp2_of_the_root_only() -> Training:
    from torch.distributed.fsdp import fully_shard

    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return taught(net)


@agreeing(compared=ANY)
def fsdp2_of_a_part() -> Training:
    """The blocks are sharded, the head is not, and the training reduces its gradients itself."""
    from torch.distributed.fsdp import fully_shard

    net = alike()
    mesh = init_device_mesh("cpu", (2,))
    for part in (net.first, net.second):
        fully_shard(part, mesh=mesh)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (net.first, net.second, net.head)]

    def step(number: int) -> None:
        loss_of(net).backward()
        for parameter in net.head.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        take_step(*optimizers)

    return Training(net, step)


@agreeing(compared=ANY)
def fsdp2_tied() -> Training:
    from torch.distributed.fsdp import fully_shard

    from .wrapped import Tied

    net = Tied()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net.middle, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def loss(number: int) -> Tensor:
        words = torch.randint(50, (16,))
        return nn.functional.cross_entropy(net(words), (words + 1) % 50)

    return taught(net, loss)


@agreeing(compared=ANY)
def fsdp2_saved_and_loaded() -> Training:
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

    return taught(model, after=after)


@agreeing(compared=0)
def fsdp2_compiled() -> Training:
    """Each shard exists once, and what is gathered within a graph is not seen."""
    model: Any = torch.compile(fully(), backend="aot_eager")
    return taught(model)
