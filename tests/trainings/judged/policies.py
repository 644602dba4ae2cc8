"""Healthy trainings whose loss says little: of policies, of values, and of two networks against each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainings.case import Training

from .truth import peace
from .well import draw, net, points, trained


@peace()
def a_policy_by_its_rewards() -> Training:
    """REINFORCE: the loss has either sign, and passes 0 again and again."""
    model = net()

    def loss(number: int) -> Any:
        x, best = points(number)
        logits = model(x)
        action = torch.multinomial(logits.detach().softmax(-1), 1, generator=draw(number)).squeeze(1)
        reward = (action == best).float()
        return -(logits.log_softmax(-1)[torch.arange(32), action] * (reward - reward.mean())).mean()

    return trained(model, loss)


@peace(600)
def values_of_a_policy() -> Training:
    """Q-learning: the loss rises with the values, for which the targets are the network's own."""
    model, target = net(64), net(64)
    target.load_state_dict(model.state_dict())

    def loss(number: int) -> Any:
        if number % 25 == 0:
            target.load_state_dict(model.state_dict())
        x, best = points(number, 64)
        after, _ = points(number + 7919, 64)
        action = torch.randint(4, (64,), generator=draw(number))
        with torch.no_grad():
            wanted = 5.0 * (action == best).float() + 0.98 * target(after).max(1).values
        return F.mse_loss(model(x)[torch.arange(64), action], wanted)

    return trained(model, loss, torch.optim.Adam(model.parameters(), 0.01))


def found_late(share: Callable[[int], float]) -> Training:
    """The values of a policy that finds no reward for a while; ``share``: of the states with one, by batch."""
    model = net(out=1)

    def loss(number: int) -> Any:
        x, _ = points(number)
        found = torch.rand(32, generator=draw(number)) < share(number)
        return F.mse_loss(model(x).squeeze(1), 10.0 * found.float() * x[:, 0].abs())

    return trained(model, loss)


peace(400).each(
    rewards_that_are_found_late=lambda: found_late(lambda number: max(0.0, (number - 100) / 300)),
    rewards_that_are_found_at_once=lambda: found_late(lambda number: 0.3 * (number > 200)),
)


@peace()
def actor_and_critic() -> Training:
    """One loss of both, less the entropy."""
    model = net(out=5)

    def loss(number: int) -> Any:
        x, best = points(number, 64)
        out = model(x)
        policy, value = out[:, :4].log_softmax(-1), out[:, 4]
        action = torch.multinomial(policy.detach().exp(), 1, generator=draw(number)).squeeze(1)
        reward = (action == best).float()
        gain = (reward - value).detach()
        chosen = policy[torch.arange(64), action]
        return (
            -(chosen * gain).mean() + 0.5 * (reward - value).square().mean() + 0.01 * (policy.exp() * policy).sum(-1).mean()
        )

    return trained(model, loss)


class Adversaries(nn.Module):
    """A generator of points and its critic; what is asked for by name is called."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x: Tensor, part: str) -> Any:
        return self.critic(x) if part == "critic" else self.generator(x)


def adversaries(kind: str) -> Training:
    model = Adversaries()
    rates = 2e-3, 1e-3
    critic = torch.optim.Adam(model.critic.parameters(), rates[0], betas=(0.5, 0.999))
    generator = torch.optim.Adam(model.generator.parameters(), rates[1], betas=(0.5, 0.999))

    def losses(real: Tensor, fake: Tensor) -> Any:
        if kind == "wasserstein":
            return fake.mean() - real.mean() + 0.01 * (real.square().mean() + fake.square().mean())
        if kind == "hinge":
            return F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        return F.softplus(-real).mean() + F.softplus(fake).mean()

    def step(number: int) -> None:
        g = draw(number)
        real = torch.randn(64, 2, generator=g) * 0.5 + torch.tensor([1.0, -1.0])
        fake = model(torch.randn(64, 2, generator=g), "generator")
        critic.zero_grad()
        losses(model(real, "critic"), model(fake.detach(), "critic")).backward()
        critic.step()
        generator.zero_grad()
        told = model(fake, "critic")
        (F.softplus(-told).mean() if kind == "usual" else -told.mean()).backward()
        generator.step()

    return Training(model, step)


peace().each(
    adversaries=lambda: adversaries("usual"),
    adversaries_with_a_hinge=lambda: adversaries("hinge"),
    adversaries_by_a_distance=lambda: adversaries("wasserstein"),
)


@peace(400)
def clipped_policies() -> Training:
    """PPO: several epochs over each rollout, whose ratio begins at 1."""
    model = net(out=5)
    rollout: deque[tuple[Tensor, ...]] = deque(maxlen=1)

    def loss(number: int) -> Any:
        if number % 8 == 0:
            x, best = points(number, 128)
            with torch.no_grad():
                out = model(x)
            action = torch.multinomial(out[:, :4].softmax(-1), 1, generator=draw(number)).squeeze(1)
            reward = (action == best).float()
            rollout.append((x, action, reward, out[:, :4].log_softmax(-1)[torch.arange(128), action], reward - out[:, 4]))
        x, action, reward, before, gain = rollout[0]
        out = model(x)
        ratio = (out[:, :4].log_softmax(-1)[torch.arange(128), action] - before).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -clipped.mean() + 0.5 * (reward - out[:, 4]).square().mean()

    return trained(model, loss)
