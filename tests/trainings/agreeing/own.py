"""Models without DDP: one reduced by hand, or one some of whose parameters are each rank's own (experts, shards, stages)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from notebook import take_step
from recorded.truths import ANY
from trainings.by_hand import gradients_summed, parts_summed
from trainings.case import Training
from trainings.ranks import Net, broadcast, draw, loss_of, own_seed, reduce_gradients, same_seed, taught
from trainings.truths import agreeing


def by_hand(model: Any, shared: Any = None, loss: Any = None, lr: float = 1e-2) -> Training:
    """Reduces the gradients of the ``shared`` parameters, or of all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    parameters = list(model.parameters() if shared is None else shared)

    return taught(model, loss, optimizer=optimizer, between=lambda n: reduce_gradients(parameters))


@agreeing(compared=6)
def gradients_reduced_by_hand() -> Training:
    net = Net()
    broadcast(net)
    return by_hand(net)


@agreeing(compared=6)
def broadcast_after_the_first_step() -> Training:
    """As Horovod's examples did: the models are made one in the first batch, once there are states of the optimizer."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def after(number: int) -> None:
        if number == 0:
            broadcast(net)

    return taught(net, optimizer=optimizer, between=lambda n: reduce_gradients(net.parameters()), after=after)


class SyncNorm(nn.BatchNorm1d):
    """Batch statistics of all ranks (torch's own runs on GPUs only)."""

    def forward(self, x: Tensor) -> Any:
        ranks = dist.get_world_size()
        mean = collectives.all_reduce(x.mean(0)) / ranks
        square = collectives.all_reduce(x.square().mean(0)) / ranks
        return (x - mean) / (square - mean.square() + self.eps).sqrt() * self.weight + self.bias


@agreeing(compared=8)
def sync_batch_norm() -> Training:
    return taught(DistributedDataParallel(Net(middle=SyncNorm)))


# --- experts -----------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """A router that all ranks share, and an expert of each rank's own; tokens go to and fro by all-to-all."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(8, 8), nn.Linear(8, 1)
        self.expert, self.head = expert, nn.Linear(8, 4)

    @property
    def shared(self) -> list[Any]:
        return [p for part in (self.first, self.router, self.head) for p in part.parameters()]

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        sent = collectives.all_to_all_single(torch.empty_like(hidden), hidden)
        back = collectives.all_to_all_single(torch.empty_like(hidden), torch.tanh(self.expert(sent)))
        return self.head(hidden + back * self.router(hidden).sigmoid())


@agreeing(compared=6)
def experts_beside_a_reduction_by_hand() -> Training:
    """Each rank draws another expert."""
    same_seed()
    model = Mixture(nn.Linear(8, 8))
    own_seed()
    model.expert = nn.Linear(8, 8)
    return by_hand(model, model.shared)


@agreeing(compared=6)
def experts_that_begin_alike() -> Training:
    same_seed()
    model = Mixture(nn.Linear(8, 8))
    return by_hand(model, model.shared)


def without_experts(model: Mixture) -> Training:
    names = [name for name, _ in model.named_parameters() if name.startswith("expert")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return taught(DistributedDataParallel(model))


@agreeing(compared=6)
def experts_that_ddp_ignores() -> Training:
    return without_experts(Mixture(nn.Linear(8, 8)))


@agreeing(compared=6)
def experts_that_ddp_ignores_and_that_begin_alike() -> Training:
    same_seed()
    return without_experts(Mixture(nn.Linear(8, 8)))


@agreeing(compared=6, ranks=4)
def experts_with_replicas() -> Training:
    """Ranks 0 and 2 have one expert, ranks 1 and 3 another, which pairs reduce; DDP reduces the rest over all."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    same_seed()
    model = Mixture(nn.Linear(8, 8))
    same_seed(1 + dist.get_rank() % 2)
    model.expert = nn.Linear(8, 8)
    own_seed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def between(number: int) -> None:
        reduce_gradients(model.shared)
        reduce_gradients(model.expert.parameters(), pairs[dist.get_rank() % 2])

    return taught(model, optimizer=optimizer, between=between)


class ParallelMlp(nn.Module):
    """Not called expert, but marked as Megatron marks it."""

    def __init__(self, attribute: str, value: object) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        for parameter in self.parameters():
            setattr(parameter, attribute, value)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


def marked(attribute: str, value: object) -> Training:
    same_seed()
    model = Mixture(ParallelMlp(attribute, value))
    own_seed()
    return by_hand(model, model.shared)


agreeing(compared=6).each(
    marked_as_not_reduced=lambda: marked("allreduce", False),
    marked_as_tensor_parallel=lambda: marked("tensor_model_parallel", True),
)


# --- tensor parallelism by hand --------------------------------------------------------------------------------------------


class Split(nn.Module):
    """A column-split and a row-split linear, and the norm before them, which all ranks share."""

    def __init__(self, has_zero_bias: bool) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8 // dist.get_world_size())
        self.down, self.offset = nn.Linear(8 // dist.get_world_size(), 8, bias=False), nn.Parameter(torch.zeros(8))
        if has_zero_bias:
            nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(gradients_summed(self.norm(x))))
        out: Tensor = x + parts_summed(self.down(hidden)) + self.offset
        return out


def split_by_hand(*, has_zero_bias: bool) -> Training:
    """The splits are drawn with seeds of their own; the head is shared. All ranks see the same data."""
    rank = dist.get_rank()
    same_seed(10 + rank)
    blocks = [Split(has_zero_bias) for _ in range(2)]
    same_seed()
    model = nn.Sequential(*blocks, nn.Linear(8, 4))

    def loss(number: int) -> Any:
        same_seed(number)
        return loss_of(model)

    return taught(model, loss)


agreeing(compared=ANY).each(
    tensor_parallel_by_hand=lambda: split_by_hand(has_zero_bias=False),
    # Megatron's biases: they begin alike, and come apart by right.
    tensor_parallel_by_hand_with_zero_biases=lambda: split_by_hand(has_zero_bias=True),
)


class SplitAdapter(nn.Module):
    """LoRA on a column-split linear: ``up`` is split too, and begins at zero on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8 // dist.get_world_size(), bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Any:
        return self.up(self.down(x))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(8, 8 // dist.get_world_size()).requires_grad_(False)
        same_seed()
        self.adapter, self.head = SplitAdapter(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = gradients_summed(x)
        mine = torch.tanh(self.split(x) + self.adapter(x))
        whole = torch.zeros(*x.shape)
        start = dist.get_rank() * mine.shape[-1]
        whole[..., start : start + mine.shape[-1]] = mine
        out: Tensor = self.head(parts_summed(whole))
        return out


@agreeing(compared=ANY)
def an_adapter_on_a_split_linear() -> Training:
    model = Adapted()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(number: int) -> None:
        same_seed(number)
        loss_of(model).backward()
        dist.all_reduce(model.adapter.down.weight.grad)  # its gradient is a part, since ``up`` is
        take_step(optimizer)

    return Training(model, step)


class PartialClasses(nn.Module):
    """The classes are divided over the ranks; their centres begin alike, as the same seed draws them on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.normal(0.0, 0.1, (5, 4)))

    def forward(self, features: Tensor, labels: Tensor) -> Any:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        all_features = torch.cat(collectives.all_gather(features))
        all_labels = torch.cat(collectives.all_gather(labels))
        logits = nn.functional.linear(nn.functional.normalize(all_features), nn.functional.normalize(self.weight))
        total: Any = collectives.all_reduce(logits.exp().sum(1))
        is_mine = (all_labels // 5) == rank
        mine = logits.gather(1, (all_labels % 5)[:, None])[:, 0].exp() * is_mine
        return -(collectives.all_reduce(mine) / total).log().mean() / ranks


class Recognised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone: Any = Net()
        self.centres = PartialClasses()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.centres(self.backbone(x), labels)


def classes_divided(seed: int) -> Training:
    same_seed(seed)
    model = Recognised()
    own_seed()
    model.backbone = DistributedDataParallel(model.backbone)
    return taught(model, lambda n: model(draw()[0], torch.randint(5 * dist.get_world_size(), (4,))))


agreeing(compared=6).each(
    classes_divided_over_the_ranks=lambda: classes_divided(seed=dist.get_rank()),
    classes_divided_that_begin_alike=lambda: classes_divided(seed=0),
)


# --- stages ------------------------------------------------------------------------------------------------------------------


def part() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def pipelined(model: Any, group: Any, first: int, schedule_name: str = "ScheduleGPipe") -> Training:
    import torch.distributed.pipelining as pipelining

    stage = pipelining.PipelineStage(model, dist.get_rank() - first, 2, torch.device("cpu"), group=group)
    schedule = getattr(pipelining, schedule_name)(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        if dist.get_rank() == first:
            schedule.step(torch.randn(8, 8))
        else:
            schedule.step(target=torch.randn(8, 8))
        take_step(optimizer)

    return Training(stage, step)


@agreeing(compared=0)
def pipeline() -> Training:
    return pipelined(part(), None, 0)


@agreeing(compared=0)
def pipeline_whose_stages_begin_alike() -> Training:
    same_seed()
    return pipelined(part(), None, 0, "Schedule1F1B")


def passed_on(model: Any) -> Training:
    """A pipeline without torch's schedules: activations and gradients are sent by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        if dist.get_rank() == 0:
            out = model(torch.randn(4, 8))
            dist.send(out.detach(), 1)
            gradient = torch.empty(4, 8)
            dist.recv(gradient, 1)
            out.backward(gradient)
        else:
            x = torch.empty(4, 8)
            dist.recv(x, 0)
            x.requires_grad_()
            model(x).square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, 0)
        take_step(optimizer)

    return Training(model, step)


@agreeing(compared=0)
def stages_by_hand() -> Training:
    return passed_on(part())


@agreeing(compared=ANY)
def stages_by_hand_that_begin_alike() -> Training:
    same_seed()
    return passed_on(part())


@agreeing(compared=0)
def two_tasks() -> Training:
    """Each rank trains another kind of model, and only the losses are shared."""
    model: Any = Net() if dist.get_rank() == 0 else nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def loss(number: int) -> Any:
        value = loss_of(model)
        dist.all_reduce(value.detach().clone())
        return value

    return taught(model, loss)


# --- one sequence over several ranks ---------------------------------------------------------------------------------------


class Sequences(nn.Module):
    """Each rank works on its part of a sequence that all of them are given."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        keys = torch.cat(collectives.all_gather(self.key(mine)))
        weights = (self.query(mine) @ keys.t()).softmax(-1)
        return self.head(weights @ keys)


@agreeing(compared=6)
def context_parallel_by_hand() -> Training:
    model = Sequences()
    broadcast(model)

    def loss(number: int) -> Any:
        same_seed(number)
        return model(torch.randn(8, 8)).square().mean()

    return by_hand(model, loss=loss)


@agreeing(compared=6)
def context_parallel_in_ddp() -> Training:
    model = DistributedDataParallel(Sequences())

    def loss(number: int) -> Any:
        same_seed(number)
        return model(torch.randn(8, 8)).square().mean()

    return taught(model, loss)
