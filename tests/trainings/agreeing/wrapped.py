"""What DDP wraps: parts, groups, odd parameters, and models that change in mid-run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

from notebook import learn
from trainings.case import Training
from trainings.ranks import Net, draw, loss_of, own_seed, reduce_gradients, same_seed, taught
from trainings.truths import agreeing


class Container(nn.Module):
    """Calls its parts, each of which is wrapped by itself."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, x: Tensor) -> Any:
        return self.decoder(torch.tanh(self.encoder(x)))


@agreeing(compared=4)
def parts_wrapped_apart() -> Training:
    return taught(Container(DistributedDataParallel(nn.Linear(8, 8)), DistributedDataParallel(nn.Linear(8, 4))))


@agreeing(compared=4)
def parts_wrapped_apart_and_never_called_together() -> Training:
    parts = Container(DistributedDataParallel(nn.Linear(8, 8)), DistributedDataParallel(nn.Linear(8, 4)))

    def loss(number: int) -> Any:
        x, y = draw()
        return (parts.decoder(torch.tanh(parts.encoder(x))) - y).square().mean()

    return taught(parts, loss)


@agreeing(compared=6, ranks=4)
def two_models_of_two_ranks() -> Training:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another one."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return taught(DistributedDataParallel(Net(), process_group=groups[dist.get_rank() // 2]))


@agreeing(compared=6, ranks=3)
def one_rank_does_not_train() -> Training:
    """Rank 2 only looks: its copy is of its own, and it calls it without gradients."""
    group = dist.new_group([0, 1])
    net = Net()
    if dist.get_rank() < 2:
        return taught(DistributedDataParallel(net, process_group=group))

    def step(number: int) -> None:
        with torch.no_grad():
            net(draw()[0])

    return Training(net, step)


@agreeing(compared=6)
def no_sync_at_the_start() -> Training:
    """``init_sync=False``: all ranks draw the same model."""
    same_seed()
    net = Net()
    own_seed()
    return taught(DistributedDataParallel(net, init_sync=False))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Any:
        return self.head(self.table(words))


@agreeing(compared=3)
def sparse_gradients() -> Training:
    model = DistributedDataParallel(Words())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return taught(model, lambda n: (model(torch.randint(50, (4, 3))) - 1).square().mean(), optimizer=optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Any:
        return self.head(torch.tanh(self.middle(self.table(words))))


@agreeing(compared=3)
def tied() -> Training:
    model = DistributedDataParallel(Tied())

    def loss(number: int) -> Tensor:
        words = torch.randint(50, (16,))
        return nn.functional.cross_entropy(model(words), (words + 1) % 50)

    return taught(model, loss)


class Odd(nn.Module):
    """Parameters of odd kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 8))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)
        self.short, self.long = nn.Parameter(torch.randn(3).half()), nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(4, 8).t())
        self.linear = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Any:
        parts = (
            self.linear(x).sum() * self.scale + self.wave.abs().sum() + self.short.float().sum() + (x @ self.turned).sum()
        )
        return (parts + self.long.sum() + self.empty.sum()).reshape(1)


@agreeing(compared=9)
def odd_parameters() -> Training:
    model = DistributedDataParallel(Odd())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return taught(model, lambda n: model(draw()[0]).square().sum(), optimizer=optimizer)


@agreeing(compared=6)
def parametrized() -> Training:
    """Weight norm gives two parameters, spectral norm draws a vector of its own."""
    net = Net()
    parametrizations.weight_norm(net.first)
    parametrizations.spectral_norm(net.second)
    net.head = nn.Linear(8, 4, bias=False)
    return taught(DistributedDataParallel(net))


@agreeing(compared=7)
def pruned_in_mid_run() -> Training:
    """Its parameters change their names and their number."""
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def before(number: int) -> None:
        if number == 100:
            prune.l1_unstructured(net.second, "weight", 0.5)

    return taught(model, optimizer=optimizer, before=before)


def wrapped_again(change: Callable[[Any], object]) -> Training:
    """In mid-run the model is changed, and wrapped by another DDP, with another optimizer."""
    net = Net()
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    now: dict[str, Any] = {"model": DistributedDataParallel(net)}
    now["optimizer"] = torch.optim.Adam(net.head.parameters(), lr=1e-2)

    def step(number: int) -> None:
        if number == 80:
            change(net)
            now["model"] = DistributedDataParallel(net)
            now["optimizer"] = torch.optim.Adam(net.parameters(), lr=1e-3)
        dtype = next(net.parameters()).dtype
        x, y = draw()
        learn((now["model"](x.to(dtype)) - y.to(dtype)).square().mean(), now["optimizer"])

    return Training(now["model"] if change is None else net, step)


agreeing(compared=6).each(
    unfrozen_and_wrapped_again=lambda: wrapped_again(lambda net: net.requires_grad_(True)),
    cast_in_mid_run=lambda: wrapped_again(lambda net: net.requires_grad_(True).to(torch.float64)),
)


@agreeing(compared=8)
def grown_in_mid_run() -> Training:
    """A new layer is drawn by each rank with its own seed; the new DDP makes them one."""

    def grow(net: Any) -> None:
        net.requires_grad_(True)
        net.norm = nn.Linear(8, 8)

    return wrapped_again(grow)


@agreeing(compared=6)
def ignored_and_reduced_by_hand() -> Training:
    """DDP ignores the head; the training reduces its gradients itself."""
    same_seed()
    net = Net()
    own_seed()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["head.weight", "head.bias"])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return taught(model, optimizer=optimizer, between=lambda n: reduce_gradients(net.head.parameters()))


@agreeing(compared=6)
def deep_copied() -> Training:
    """What is trained is a copy of what was built and tried before."""
    first = DistributedDataParallel(Net())
    loss_of(first).backward()
    return taught(DistributedDataParallel(copy.deepcopy(first.module)))
