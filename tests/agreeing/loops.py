"""Loops: several optimizers, and who runs the model between the steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch

from .case import ANY, Net, Step, draw, healthy, loss_of, reduce_gradients, trained

# --- several optimizers ------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = DistributedDataParallel(Net())
        self.critic: Any = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))


def adversaries(*, of_the_critic: int = 1, warm_up: int = 0, clips: bool = False) -> Step:
    """The critic makes several steps for each one of the generator, and the generator's gradients are not detached."""
    gan = Pair()
    rankwatch.watch(gan)
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

    return step


@healthy(compared=10)
def a_gan() -> Step:
    return adversaries()


@healthy(compared=10)
def a_gan_whose_critic_steps_often() -> Step:
    return adversaries(of_the_critic=5, clips=True)


@healthy(compared=10)
def a_gan_whose_critic_warms_up() -> Step:
    """The generator has gradients, and makes its first step after 60."""
    return adversaries(warm_up=60)


@healthy(compared=6)
def two_optimizers_by_turns() -> Step:
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    net = model.module
    parts = [(net.first, net.second), (net.head,)]
    turns = [torch.optim.SGD([p for m in part for p in m.parameters()], lr=1e-2) for part in parts]

    def step(number: int) -> None:
        loss_of(model).backward()
        turns[number // 40 % 2].step()
        model.zero_grad()

    return step


@healthy(compared=6)
def a_probe_on_rank_zero() -> Step:
    """Rank 0 alone trains a probe of its own beside the model, and steps it thrice as often."""
    model = DistributedDataParallel(Net())
    probe = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(probe.parameters(), lr=1e-2)

    def after(number: int) -> None:
        for _ in range(3 if dist.get_rank() == 0 else 0):
            with torch.no_grad():
                features = model.module(draw()[0])
            probe(features).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return trained(model, after=after)


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = Net()
        self.probe = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


@healthy(compared=ANY)
def a_probe_inside_on_rank_zero() -> Step:
    """The same, and the probe is a part of what is watched: rank 0 counts more steps than the other one."""
    whole = Probed()
    whole.net = DistributedDataParallel(whole.net)
    optimizer = torch.optim.SGD(whole.probe.parameters(), lr=1e-2)

    def after(number: int) -> None:
        for _ in range(3 if dist.get_rank() == 0 else 0):
            with torch.no_grad():
                features = whole.net(draw()[0])
            nn.functional.linear(features, whole.probe.weight).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return trained(whole, optimizer=torch.optim.Adam(whole.net.parameters(), lr=1e-2), after=after)


@healthy(compared=6)
def lbfgs() -> Step:
    """Several forwards in one step; the loss is averaged, so that all ranks search alike."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)

    def step(number: int) -> None:
        x, y = draw()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            dist.all_reduce(loss.detach())
            mean: Tensor = loss.detach() / dist.get_world_size()
            return mean

        optimizer.step(closure)

    return step


def perturb(parameters: list[Any], radius: float) -> list[Tensor]:
    """Goes uphill; returns the way back."""
    norm = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
    ways = [p.grad * (radius / norm) for p in parameters]
    with torch.no_grad():
        for parameter, way in zip(parameters, ways, strict=True):
            parameter.add_(way)
    return ways


@healthy(compared=6)
def sharpness_aware() -> Step:
    """Each rank perturbs by its own gradient, as the paper asks for; the second backward is synchronised."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    parameters: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-2)

    def step(number: int) -> None:
        x, y = draw()
        before = [parameter.detach().clone() for parameter in parameters]
        with model.no_sync():
            (model(x) - y).square().mean().backward()
        perturb(parameters, 0.05)
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)  # what is subtracted again is rounded, on each rank in its own way
        optimizer.step()
        model.zero_grad()

    return step


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


@healthy(compared=6)
def sharpness_aware_by_its_optimizer() -> Step:
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = Ascent(model.parameters(), torch.optim.SGD, lr=1e-2)

    def step(number: int) -> None:
        x, y = draw()
        (model(x) - y).square().mean().backward()
        optimizer.step(lambda: (model(x) - y).square().mean().backward())

    return step


@healthy(compared=6)
def sharpness_aware_by_two_optimizers() -> Step:
    """The way uphill is a step of an optimizer of its own, upon the rank's own gradient."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    up = torch.optim.SGD(model.parameters(), lr=0.05, maximize=True)
    down = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        x, y = draw()
        before = [p.detach().clone() for p in model.parameters()]
        with model.no_sync():
            (model(x) - y).square().mean().backward()
        up.step()
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), before)
        down.step()
        model.zero_grad()

    return step


# --- what is looked at between the steps ---------------------------------------------------------------------------------


@healthy(compared=6)
def evaluations_on_rank_zero() -> Step:
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

    return trained(model, after=after)


@healthy(compared=6)
def evaluations_on_all_ranks() -> Step:
    model = DistributedDataParallel(Net())

    def after(number: int) -> None:
        if number % 20 == 19:
            model.eval()
            with torch.no_grad():
                for _ in range(2 + dist.get_rank()):
                    model(draw()[0])
            model.train()

    return trained(model, after=after)


@healthy(compared=6)
def adversarial_inputs() -> Step:
    """Inputs are attacked by gradients of their own, for which the model runs thrice in a step."""
    model = DistributedDataParallel(Net())

    def loss(number: int) -> Tensor:
        x, y = draw()
        for _ in range(2):
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((model.module(x) - y).square().mean(), x)
            x = x + 0.1 * gradient.sign()
        out: Tensor = (model(x.detach()) - y).square().mean()
        return out

    return trained(model, loss)


@healthy(compared=6)
def inner_loop_with_other_weights() -> Step:
    """MAML: the inner loop runs the model with weights that are not its parameters."""
    model = DistributedDataParallel(Net())
    net = model.module

    def loss(number: int) -> Tensor:
        x, y = draw()
        weights = dict(net.named_parameters())
        inner = (torch.func.functional_call(net, weights, (x,)) - y).square().mean()
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        x, y = draw()
        out: Tensor = (torch.func.functional_call(net, moved, (x,)) - y).square().mean()
        return out

    def after(number: int) -> None:
        pass

    rankwatch.watch(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    def step(number: int) -> None:
        loss(number).backward()
        reduce_gradients(net.parameters())
        optimizer.step()
        optimizer.zero_grad()

    return step


@healthy(compared=6)
def noise_on_the_weights() -> Step:
    """Each rank trains under noise of its own, which is taken off before the step."""
    model = DistributedDataParallel(Net())
    rankwatch.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    parameters: list[Tensor] = list(model.parameters())

    def noisy(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.kept = [p.clone() for p in parameters]
            for parameter in parameters:
                parameter.add_(0.01 * torch.randn_like(parameter))

    model.module.register_forward_pre_hook(noisy)

    def step(number: int) -> None:
        loss_of(model).backward()
        with torch.no_grad():
            torch._foreach_copy_(parameters, model.module.kept)
        optimizer.step()
        optimizer.zero_grad()

    return step
