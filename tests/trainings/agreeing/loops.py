"""Loops: several optimizers, and who runs the model between the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from notebook import learn
from recorded.truths import ANY
from trainings.case import Training
from trainings.ranks import Net, draw, loss_of, reduce_gradients, taught
from trainings.truths import agreeing

# --- several optimizers ------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = DistributedDataParallel(Net())
        self.critic: Any = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))


def adversaries(*, of_the_critic: int = 1, warm_up: int = 0, clips: bool = False) -> Training:
    """The critic makes several steps for each one of the generator, and the generator's gradients are not detached."""
    gan = Pair()
    ours = torch.optim.Adam(gan.generator.parameters(), lr=1e-3)
    theirs = torch.optim.Adam(gan.critic.parameters(), lr=1e-3)

    def step(number: int) -> None:
        (gan.critic(torch.randn(4, 4) + 2).mean() - gan.critic(gan.generator(draw()[0])).mean()).backward()
        theirs.step()
        if clips:
            with torch.no_grad():
                for parameter in gan.critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
        gan.zero_grad()
        if number >= warm_up and number % of_the_critic == 0:
            gan.critic(gan.generator(draw()[0])).mean().backward()
            ours.step()
            gan.zero_grad()

    return Training(gan, step)


agreeing(compared=10).each(
    a_gan=lambda: adversaries(),
    a_gan_whose_critic_steps_often=lambda: adversaries(of_the_critic=5, clips=True),
    # The generator has gradients, and makes its first step after 60.
    a_gan_whose_critic_warms_up=lambda: adversaries(warm_up=60),
)


@agreeing(compared=6)
def two_optimizers_by_turns() -> Training:
    model = DistributedDataParallel(Net())
    net = model.module
    parts = [(net.first, net.second), (net.head,)]
    turns = [torch.optim.SGD([p for m in part for p in m.parameters()], lr=1e-2) for part in parts]

    def step(number: int) -> None:
        loss_of(model).backward()
        turns[number // 40 % 2].step()
        model.zero_grad()

    return Training(model, step)


@agreeing(compared=6)
def a_probe_on_rank_zero() -> Training:
    """Rank 0 alone trains a probe of its own beside the model, and steps it thrice as often."""
    model = DistributedDataParallel(Net())
    probe = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(probe.parameters(), lr=1e-2)

    def after(number: int) -> None:
        for _ in range(3 if dist.get_rank() == 0 else 0):
            with torch.no_grad():
                features = model.module(draw()[0])
            learn(probe(features).square().mean(), optimizer)

    return taught(model, after=after)


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = Net()
        self.probe = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


@agreeing(compared=ANY)
def a_probe_inside_on_rank_zero() -> Training:
    """The same, and the probe is a part of what is watched: rank 0 counts more steps than the other one."""
    whole = Probed()
    whole.net = DistributedDataParallel(whole.net)
    optimizer = torch.optim.SGD(whole.probe.parameters(), lr=1e-2)

    def after(number: int) -> None:
        for _ in range(3 if dist.get_rank() == 0 else 0):
            with torch.no_grad():
                features = whole.net(draw()[0])
            learn(nn.functional.linear(features, whole.probe.weight).square().mean(), optimizer)

    return taught(whole, optimizer=torch.optim.Adam(whole.net.parameters(), lr=1e-2), after=after)


@agreeing(compared=6)
def lbfgs() -> Training:
    """Several forwards in one step; the loss is averaged, so that all ranks search alike."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)

    def step(number: int) -> None:
        x, y = draw()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            dist.all_reduce(loss.detach())
            return loss.detach() / dist.get_world_size()

        optimizer.step(closure)

    return Training(model, step)


def perturb(parameters: list[Any], radius: float) -> list[Tensor]:
    """Goes uphill; returns the way back."""
    norm = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
    ways = [p.grad * (radius / norm) for p in parameters]
    with torch.no_grad():
        for parameter, way in zip(parameters, ways, strict=True):
            parameter.add_(way)
    return ways


def sharpness(uphill: Callable[[list[Tensor]], Callable[[], object]]) -> Training:
    """Each rank goes uphill by its own gradient, as the paper asks for; the second backward is synchronised."""
    model = DistributedDataParallel(Net())
    parameters: list[Tensor] = list(model.parameters())
    climb, optimizer = uphill(parameters), torch.optim.SGD(parameters, lr=1e-2)

    def step(number: int) -> None:
        x, y = draw()
        before = [parameter.detach().clone() for parameter in parameters]
        with model.no_sync():
            (model(x) - y).square().mean().backward()
        climb()
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)  # what is subtracted again is rounded, on each rank in its own way
        optimizer.step()
        model.zero_grad()

    return Training(model, step)


def by_optimizer(parameters: list[Tensor]) -> Callable[[], object]:
    """The way uphill is a step of an optimizer of its own."""
    up = torch.optim.SGD(parameters, lr=0.05, maximize=True)
    return lambda: up.step()


agreeing(compared=6).each(
    sharpness_aware=lambda: sharpness(lambda parameters: lambda: perturb(parameters, 0.05)),
    sharpness_aware_by_two_optimizers=lambda: sharpness(by_optimizer),
)


class Ascent(torch.optim.Optimizer):
    """The usual class of sharpness-aware training, whose first step is a method of its own."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.ways: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        again = torch.enable_grad()(closure)
        self.ways = perturb(parameters, 0.05)
        self.zero_grad()
        again()
        for parameter, way in zip(parameters, self.ways, strict=True):
            parameter.sub_(way)
        self.base.step()
        self.zero_grad()


@agreeing(compared=6)
def sharpness_aware_by_its_optimizer() -> Training:
    model = DistributedDataParallel(Net())
    optimizer = Ascent(model.parameters(), torch.optim.SGD, lr=1e-2)

    def step(number: int) -> None:
        x, y = draw()
        (model(x) - y).square().mean().backward()
        optimizer.step(lambda: (model(x) - y).square().mean().backward())

    return Training(model, step)


# --- what is looked at between the steps ---------------------------------------------------------------------------------


@agreeing(compared=6)
def evaluations_on_rank_zero() -> Training:
    """Between the steps rank 0 evaluates the module inside of DDP, in eval mode and in training mode, twice with gradients."""
    model = DistributedDataParallel(Net())

    def after(number: int) -> None:
        if number % 3 == 0 and dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model.module(draw()[0])
            model.module(draw()[0])
            model.train()
            model.module(draw()[0])

    return taught(model, after=after)


@agreeing(compared=6)
def evaluations_on_all_ranks() -> Training:
    model = DistributedDataParallel(Net())

    def after(number: int) -> None:
        if number % 20 == 19:
            model.eval()
            with torch.no_grad():
                for _ in range(2 + dist.get_rank()):
                    model(draw()[0])
            model.train()

    return taught(model, after=after)


@agreeing(compared=6)
def adversarial_inputs() -> Training:
    """Inputs are attacked by gradients of their own, for which the model runs thrice in a step."""
    model = DistributedDataParallel(Net())

    def loss(number: int) -> Any:
        x, y = draw()
        for _ in range(2):
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((model.module(x) - y).square().mean(), x)
            x = x + 0.1 * gradient.sign()
        return (model(x.detach()) - y).square().mean()

    return taught(model, loss)


@agreeing(compared=6)
def inner_loop_with_other_weights() -> Training:
    """MAML: the inner loop runs the model with weights that are not its parameters."""
    model = DistributedDataParallel(Net())
    net = model.module

    def loss(number: int) -> Any:
        x, y = draw()
        weights = dict(net.named_parameters())
        inner = (torch.func.functional_call(net, weights, (x,)) - y).square().mean()
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        x, y = draw()
        return (torch.func.functional_call(net, moved, (x,)) - y).square().mean()

    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    return taught(model, loss, optimizer=optimizer, between=lambda n: reduce_gradients(net.parameters()))


@agreeing(compared=6)
def noise_on_the_weights() -> Training:
    """Each rank trains under noise of its own, which is taken off before the step."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)  # ahead of the hook that adds the noise
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    parameters: list[Tensor] = list(model.parameters())

    def noisy(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.kept = [p.clone() for p in parameters]
            for parameter in parameters:
                parameter.add_(0.01 * torch.randn_like(parameter))

    model.module.register_forward_pre_hook(noisy)

    def between(number: int) -> None:
        with torch.no_grad():
            torch._foreach_copy_(parameters, model.module.kept)

    return replace(taught(model, optimizer=optimizer, between=between), is_watched=True)
