"""Trainings that average weights now and then: in between, replicas differ by right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from notebook import learn, take_step
from recorded.truths import ANY
from trainings.case import Training
from trainings.ranks import EPOCH, Net, average, broadcast, draw, loss_of, own_seed, reduce_gradients, taught
from trainings.truths import agreeing


def local(every: int) -> Training:
    """A plain model, and steps upon the rank's own gradients."""
    net = Net()
    broadcast(net)

    def after(number: int) -> None:
        if number % every == every - 1:
            average(net.parameters())

    return taught(net, after=after)


agreeing(compared=ANY).each(
    local_sgd=lambda: local(4),
    local_sgd_seldom=lambda: local(64),
    local_sgd_at_each_step=lambda: local(1),
)


@agreeing(compared=ANY)
def federated_in_epochs() -> Training:
    """The clients have different numbers of batches: their counts of steps come apart."""
    net = Net()
    broadcast(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    def step(number: int) -> None:
        for _ in range(1 + dist.get_rank()):
            learn(loss_of(net), optimizer)
        if number % 5 == 4:
            average(net.parameters())

    return Training(net, step)


@agreeing(compared=ANY)
def federated_with_a_new_optimizer() -> Training:
    """Each round a client loads the server's weights, and trains them by an optimizer of its own."""
    net = Net()
    broadcast(net)
    server = copy.deepcopy(net.state_dict())

    def step(number: int) -> None:
        if number % 10:
            return
        net.load_state_dict(server)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for _ in range(10):
            learn(loss_of(net), optimizer)
        for name, value in net.state_dict().items():
            dist.all_reduce(value.detach())
            server[name] = value / dist.get_world_size()

    return Training(net, step)


def averaged_later(start: int, period: int) -> Training:
    """DDP reduces until step ``start``; from then on weights are averaged once in a ``period``."""
    model = DistributedDataParallel(Net())
    model.register_comm_hook(
        PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=start), post_localSGD_hook
    )
    averager = averagers.PeriodicModelAverager(period=period, warmup_steps=start)
    return taught(model, optimizer=PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), averager))


agreeing(compared=ANY).each(
    post_local_sgd=lambda: averaged_later(50, 4),
    # The averaging comes after the steps that are watched here.
    post_local_sgd_that_never_averages_again=lambda: averaged_later(100, 1000),
)


@agreeing(compared=ANY, ranks=4)
def hierarchical_sgd() -> Training:
    """Pairs average each second step, all four each eighth."""
    from collections import OrderedDict

    pairs, _ = dist.new_subgroups(2)
    model = DistributedDataParallel(Net())
    model.register_comm_hook(PostLocalSGDState(None, pairs, start_localSGD_iter=10), post_localSGD_hook)
    averager = HierarchicalModelAverager(period_group_size_dict=OrderedDict([(2, 2), (8, 4)]), warmup_steps=10)

    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), averager)
    return taught(model, optimizer=optimizer)


@agreeing(compared=ANY)
def diloco() -> Training:
    """An outer optimizer steps each 20 steps upon the average of what the ranks have moved."""
    net = Net()
    broadcast(net)
    outer = [p.detach().clone().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)

    def after(number: int) -> None:
        if number % 20 < 19:
            return
        for mine, theirs in zip(net.parameters(), outer, strict=True):
            theirs.grad = theirs.detach() - mine.detach()
        reduce_gradients(outer)
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(net.parameters(), outer, strict=True):
                mine.copy_(theirs)

    return taught(net, after=after)


@agreeing(compared=ANY)
def diloco_under_no_sync() -> Training:
    """The same with a model in DDP, each of whose backwards is under ``no_sync``."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        with model.no_sync():
            loss_of(model).backward()
        take_step(optimizer)
        if number % 20 == 19:
            average(model.parameters())

    return Training(model, step)


@agreeing(compared=ANY, ranks=4)
def gossip() -> Training:
    """Each rank averages with one neighbour, another one each time: never again are all equal."""
    net = Net()
    broadcast(net)
    rank = dist.get_rank()

    def after(number: int) -> None:
        partner = rank ^ (1 + number % 3)
        for parameter in net.parameters():
            mine, theirs = parameter.detach(), torch.empty_like(parameter)
            sends = dist.P2POp(dist.isend, mine.clone(), partner)
            for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, theirs, partner)]):
                work.wait()
            mine.copy_((mine + theirs) / 2)

    return taught(net, after=after)


@agreeing(compared=ANY)
def personal_layers() -> Training:
    """The body is averaged at each step; the head is each client's own, and begins as it was drawn there."""
    net = Net()
    for part in (net.first, net.second):
        broadcast(part)

    def after(number: int) -> None:
        average((*net.first.parameters(), *net.second.parameters()))

    return taught(net, after=after)


@agreeing(compared=ANY)
def parameter_server() -> Training:
    """Rank 0 alone has an optimizer, and broadcasts the weights."""
    net = Net()
    broadcast(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(number: int) -> None:
        loss_of(net).backward()
        reduce_gradients(net.parameters())
        if dist.get_rank() == 0:
            optimizer.step()
        net.zero_grad()
        broadcast(net)

    return Training(net, step)


@agreeing(compared=0)
def actor_and_learner() -> Training:
    """Rank 0 learns; rank 1 acts without gradients, with weights that it is sent each tenth step."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(number: int) -> None:
        if dist.get_rank() == 0:
            learn(loss_of(net), optimizer)
        else:
            with torch.no_grad():
                net(draw()[0])
        if number % 10 == 9:
            broadcast(net)

    return Training(net, step)


@agreeing(compared=ANY)
def reptile() -> Training:
    """Five steps on the rank's own task, then all move towards the average."""
    net = Net()
    broadcast(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=2e-2)

    def step(number: int) -> None:
        if number % 5 == 0:
            net.start = [p.detach().clone() for p in net.parameters()]  # type: ignore[assignment]
        learn(loss_of(net), optimizer)
        if number % 5 == 4:
            average(net.parameters())
            with torch.no_grad():
                for parameter, start in zip(net.parameters(), net.start, strict=True):  # type: ignore[arg-type]
                    parameter.copy_(start + 0.5 * (parameter - start))

    return Training(net, step)


# --- averages beside the replicas ----------------------------------------------------------------------------------------


@agreeing(compared=6)
def ema_outside() -> Training:
    model = DistributedDataParallel(Net())
    average_of: Any = AveragedModel(model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    return taught(model, after=lambda n: average_of.update_parameters(model.module))


class WithEma(nn.Module):
    """Keeps the average of its weights inside, as parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def update(self) -> None:
        with torch.no_grad():
            for kept, new in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                kept.lerp_(new, 0.01)


@agreeing(compared=12)
def ema_inside() -> Training:
    whole = WithEma()
    return taught(DistributedDataParallel(whole), after=lambda n: whole.update())


@agreeing(compared=6)
def ema_of_rank_zero_inside() -> Training:
    """Only rank 0 keeps the average, which it saves: the others' stays as it began, and nobody reads it."""
    whole = WithEma()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        whole, [f"ema.{n}" for n, _ in Net().named_parameters()]
    )
    model = DistributedDataParallel(whole)
    whole.ema.load_state_dict(whole.net.state_dict())
    return taught(model, after=lambda n: whole.update() if dist.get_rank() == 0 else None)


def evaluated_at_times(evaluate: Callable[[nn.Module], object]) -> Training:
    """Each tenth step, rank 0 alone puts the averages in, evaluates, and puts the weights back."""
    model = DistributedDataParallel(Net())
    kept = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def put(values: list[torch.Tensor]) -> None:
        torch._foreach_copy_(list(model.parameters()), values)

    def after(number: int) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(kept, list(model.parameters()), 0.01)
        if number % 10 or dist.get_rank():
            return
        weights = [p.detach().clone() for p in model.parameters()]
        model.eval()
        put(kept)
        evaluate(model.module)
        put(weights)
        model.train()

    return taught(model, after=after)


agreeing(compared=6).each(
    ema_weights_for_an_evaluation=lambda: evaluated_at_times(torch.no_grad()(loss_of)),
    # Rank 0 has forgotten ``no_grad``.
    ema_weights_for_an_evaluation_with_gradients=lambda: evaluated_at_times(loss_of),
)


@agreeing(compared=8)
def swa() -> Training:
    """Averages from step 100 on; at the end of each epoch, the average is evaluated."""
    model = DistributedDataParallel(Net(middle=nn.BatchNorm1d))
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    averaged: Any = AveragedModel(model.module)
    schedule = SWALR(optimizer, swa_lr=1e-2)

    def after(number: int) -> None:
        if number >= 100:
            averaged.update_parameters(model.module)
            schedule.step()
        if number % EPOCH == EPOCH - 1:
            update_bn([draw()[0] for _ in range(3)], averaged)

    return taught(model, optimizer=optimizer, after=after)


@agreeing(compared=8)
def swa_of_the_model_itself() -> Training:
    """In the end the model is the average: its weights are loaded, and trained on."""
    model = DistributedDataParallel(Net(middle=nn.BatchNorm1d))
    averaged: Any = AveragedModel(model.module)

    def after(number: int) -> None:
        averaged.update_parameters(model.module)
        if number % EPOCH == EPOCH - 1:
            model.module.load_state_dict(averaged.module.state_dict())

    return taught(model, after=after)


@agreeing(compared=6)
def lookahead() -> Training:
    """Slow weights: each fifth step, all ranks alike go back half of the way."""
    model = DistributedDataParallel(Net())
    slow = [p.detach().clone() for p in model.parameters()]

    def after(number: int) -> None:
        if number % 5 == 4:
            with torch.no_grad():
                for kept, new in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(new, 0.5)
                    new.copy_(kept)

    own_seed()
    return taught(model, after=after)
