"""FSDP1, FSDP2, hybrid sharding, and tensor parallelism by DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from notebook import learn
from recorded.truths import Truth
from trainings.by_hand import gathered, own_part
from trainings.case import Training
from trainings.ranks import flat, fully, reduce_gradients
from trainings.truths import desynced

from .parts import WEIGHT, Block, Data, Tower, ddp, flip, following, net, on, sgd

PAIRS = ((0, 2), (1, 3))
"""In a mesh of two replicas by two shards: the ranks with the same shard."""


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def own(model: nn.Module, name: str) -> Any:
    """This rank's shard of a parameter of FSDP2."""
    weight: Any = model.get_parameter(name)
    return weight._local_tensor


@desynced(Truth(("initialisation",), (), 0), ranks=4, groups=PAIRS, batches=60)
def hybrid_shards_of_four_seeds() -> Training:
    """FSDP2 hands no weights on: each rank cuts its shards out of a model of its own."""
    model = net(seed=dist.get_rank())
    return following(fully(model, hybrid(), model.blocks))


@desynced(Truth(("one-rank", "unknown"), (1, 3), 40, (WEIGHT,), 1), ranks=4, groups=PAIRS, batches=70)
def a_flipped_bit_in_a_hybrid_shard() -> Training:
    model = net()
    root = fully(model, hybrid(), model.blocks)
    return following(root, before=on(3, 40, lambda: flip(own(model, WEIGHT))))


def averages_but(is_skipped: Callable[[Tensor], bool], replicas: dist.ProcessGroup) -> None:
    """From now on some tensors are not averaged over the replicas."""
    all_reduce = dist.all_reduce

    def reduced(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if options.get("group") is replicas and is_skipped(tensor):
            return None
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = reduced


@desynced(Truth(("unsynchronised",), (), 1), ranks=4, groups=PAIRS, batches=60)
def hybrid_shards_that_are_never_averaged() -> Training:
    """Gradients are reduced within a replica, and not over the replicas."""
    model, mesh = net(), hybrid()
    averages_but(lambda tensor: True, mesh.get_group("replica"))
    return following(fully(model, mesh, model.blocks))


@desynced(Truth(("subset", "unsynchronised"), (), 1, ("blocks.",)), ranks=4, groups=PAIRS, batches=60)
def hybrid_blocks_that_are_never_averaged() -> Training:
    model, mesh = net(), hybrid()
    averages_but(lambda tensor: tensor.numel() > 100, mesh.get_group("replica"))
    return following(fully(model, mesh, model.blocks))


@desynced(Truth(("unsynchronised",), (0, 1), 1), groups=((0, 1),))
def fsdp1_in_shards_of_one() -> Training:
    """HYBRID_SHARD of size (n, 1): torch turns it into NO_SHARD over groups of one rank, which reduce nothing."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    return following(flat(net(), Block, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD))


@desynced(Truth(("initialisation",), (), 0), ranks=4, groups=PAIRS, batches=60)
def fsdp1_hybrid_shards_of_four_seeds() -> Training:
    return following(
        flat(net(dist.get_rank()), Block, device_mesh=hybrid(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    )


class Garbled:
    """From batch ``at`` on, all ranks but the sender receive one wrong element of the sender's shard, in one module."""

    def __init__(self, module: nn.Module, sender: int, at: int, until: int = 10**9) -> None:
        self._sender, self._first, self._last = sender, at, until
        self._batch, self._is_next = 0, False
        module.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        for name in ("all_gather", "all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                setattr(dist, name, self._wrapped(getattr(dist, name)))

    def _begin(self) -> None:
        self._is_next = self._first <= self._batch < self._last
        self._batch += 1

    def _wrapped(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        def garbled(output: Any, part: Tensor, *arguments: Any, **options: Any) -> Any:
            work = gather(output, part, *arguments, **options)
            if self._is_next:
                self._is_next = False
                if work is not None:
                    work.wait()
                if dist.get_rank() != self._sender:
                    parts = output if isinstance(output, list) else output.chunk(dist.get_world_size())
                    flip(parts[self._sender], bit=12 if part.element_size() == 4 else 3)
            return work

        return garbled


@desynced(Truth(("gather",), (0, 2), 50, ("blocks.1.norm.weight",), 1), ranks=3, groups=((0,), (1,), (2,)), batches=90)
def a_gather_garbled_for_all_receivers() -> Training:
    """FSDP2: what the receivers have is equal, and is not what rank 1 sent."""
    model = net()
    root = fully(model, init_device_mesh("cpu", (3,)), model.blocks)
    Garbled(model.blocks[1], sender=1, at=50)
    return following(root)


@desynced(
    Truth(("gather",), (1,), 50, ("blocks.1.norm.weight",), 1, within=1),
    groups=((0,), (1,)),
    batches=80,
    fingerprints=1,
)
def a_gather_garbled_once() -> Training:
    model = net()
    root = fully(model, init_device_mesh("cpu", (2,)), model.blocks)
    Garbled(model.blocks[1], sender=0, at=50, until=51)
    return following(root)


@desynced(Truth(("gather",), (0, 2), 50, ("blocks.1.up.weight",), 1), ranks=3, groups=((0,), (1,), (2,)), batches=90)
def a_gather_of_fsdp1_garbled() -> Training:
    root = flat(net(), Block)
    Garbled(root._fsdp_wrapped_module.blocks[1], sender=1, at=50)
    return following(root)


@desynced(Truth(("gather",), (0, 2), 50, ("blocks.1.norm.weight",), 1), ranks=3, groups=((0,), (1,), (2,)), batches=90)
def a_gather_in_bfloat16_garbled() -> Training:
    """What is handed to the gather is not the shard, but the shard in another dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully(model, init_device_mesh("cpu", (3,)), model.blocks, mp_policy=policy)
    Garbled(model.blocks[1], sender=1, at=50)
    return following(model)


@desynced(Truth(("one-rank", "unknown"), (1, 3), 40), ranks=4, groups=PAIRS, batches=70)
def a_flipped_bit_in_a_hybrid_shard_of_fsdp1() -> Training:
    root = flat(net(), Block, device_mesh=hybrid(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    return following(
        root, before=on(3, 40, lambda: flip(root._fsdp_wrapped_module.blocks[1]._handle.flat_param._local_shard))
    )


def tensor_parallel(model: Tower, mesh: DeviceMesh, *, norms: bool) -> Any:
    """Up by columns, down by rows; ``norms``: the LayerNorms are DTensors too, replicated."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        norm: Any = block.norm
        for name in ("weight", "bias") if norms else ():
            setattr(norm, name, nn.Parameter(distribute_tensor(getattr(norm, name).detach(), mesh, [Replicate()])))
    return model


class LocalNorm(nn.LayerNorm):
    """A LayerNorm over this rank's part of the sequence. ``to_local`` does not reduce the gradients of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (p.to_local() if hasattr(p, "to_local") else p for p in (self.weight, self.bias))
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SequenceBlock(Block):
    """Each rank normalises its part of the sequence, so the norm's gradients are sums over a part: they must be reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LocalNorm(8)

    def forward(self, x: Tensor) -> Any:
        whole = gathered(self.norm(own_part(x)))
        return x + self.down(torch.tanh(self.up(whole)))


def sequence_parallel() -> Tower:
    torch.manual_seed(0)
    model = Tower()
    for index in range(3):
        model.blocks[index] = SequenceBlock()
    return model


NORMS = tuple(f"blocks.{index}.norm." for index in range(3))


def reduced_but_the_norms(model: Tower) -> Training:
    parameters = dict(model.named_parameters())
    plain = [p for name, p in parameters.items() if ".norm" not in name and not hasattr(p, "_local_tensor")]
    return following(model, Data(0), between=lambda number: reduce_gradients(plain))


@desynced(Truth(("subset",), (0, 1), 1, NORMS, 6, within=40, is_declared=False))
def norms_left_out_of_a_reduction() -> Training:
    """The norms are plain parameters beside DTensors."""
    model = sequence_parallel()
    return reduced_but_the_norms(tensor_parallel(model, init_device_mesh("cpu", (2,)), norms=False))


@desynced(Truth(("subset",), (0, 1), 1, NORMS, 6))
def replicated_norms_left_out_of_a_reduction() -> Training:
    """The norms are DTensors that say Replicate."""
    model = sequence_parallel()
    return reduced_but_the_norms(tensor_parallel(model, init_device_mesh("cpu", (2,)), norms=True))


@desynced(Truth(("one-rank",), (2,), 70), ranks=3, batches=100)
def a_flipped_bit_of_a_replicated_tensor() -> Training:
    from torch.distributed.tensor import Replicate, distribute_tensor

    model, mesh = net(), init_device_mesh("cpu", (3,))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    optimizer, data = sgd(model), Data(0)
    before = on(2, 70, lambda: flip(own(model, "blocks.1.norm.weight")))

    def step(number: int) -> Any:
        x, y = (distribute_tensor(values, mesh, [Replicate()]) for values in data.batch())
        loss: Any = nn.functional.mse_loss(model(x), y)
        learn(loss, optimizer)
        return loss.to_local().detach()

    return Training(model, step, before)


@desynced(Truth(("one-rank", "unknown"), (), 40, lines=-1), ranks=4, groups=PAIRS, batches=70)
def a_flipped_bit_under_two_dimensions() -> Training:
    """FSDP2 by tensor parallelism: replicas of the norm's shard are the ranks of one tensor-parallel group. Nothing averages
    their gradients, so other parameters follow the norm, one after the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    model = tensor_parallel(net(), mesh["tensor"], norms=True)
    for block in model.blocks:
        block.norm.__class__ = LocalNorm
    root = fully(model, mesh["data"], model.blocks)
    flips = on(2, 40, lambda: flip(own(model, "blocks.1.norm.weight")))
    return following(root, Data(dist.get_rank() % 2), before=flips)


# --- buffers ------------------------------------------------------------------------------------------------------------


def with_angles(model: Tower) -> Tower:
    """With tables that no checkpoint has: those of rank 1 are what was in memory."""
    made = torch.linspace(0.1, 1.0, 8) if dist.get_rank() != 1 else torch.full((8,), 0.7)
    for block in model.blocks:
        block.register_buffer("angles", made.clone(), persistent=False)
        block.register_forward_pre_hook(lambda block, given: (given[0] + block.angles.sin(),))
    return model


def never_written(*ranks: int) -> Truth:
    return Truth(("buffer",), ranks, 1, ("blocks.",), 3, within=0, is_declared=False)


@desynced(never_written(1), ranks=3, groups=((0, 1, 2),), batches=60)
def fsdp2_with_tables_that_one_rank_never_wrote() -> Training:
    model = with_angles(net())
    return following(fully(model, init_device_mesh("cpu", (3,)), model.blocks))


@desynced(never_written(0, 1), groups=((0, 1),), batches=60)
def fsdp1_with_tables_that_one_rank_never_wrote() -> Training:
    return following(flat(with_angles(net()), Block))


@desynced(never_written(1), ranks=4, groups=((0, 1, 2, 3),), batches=60)
def hybrid_shards_with_tables_that_one_rank_never_wrote() -> Training:
    model = with_angles(net())
    return following(fully(model, hybrid(), model.blocks))


@desynced(never_written(1), ranks=3, batches=60)
def ddp_that_hands_no_tables_on() -> Training:
    return following(ddp(with_angles(net()), broadcast_buffers=False))
