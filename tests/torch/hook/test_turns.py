"""Losses that take turns: whose loss a backward has, and which trainings have one loss alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

from notebook import Notebook, learn, take_step, watched
from rankwatch.shared.types.frame import LOSS_OF_SOME, Kind

ROUNDS, LEARNT = 8, 4
"""The rounds of a training, and those after which it is known whose a loss is."""

judge = functional.binary_cross_entropy_with_logits


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


class Painter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, noise: Tensor) -> Tensor:
        return self.net(noise)  # type: ignore[no-any-return]


class Actor(nn.Linear):
    pass


class Critic(nn.Linear):
    pass


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = Discriminator(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.ours = Adam(self.generator.parameters(), lr=1e-3)
        self.theirs = Adam(self.discriminator.parameters(), lr=1e-3)

    def fake(self) -> Tensor:
        return self.generator(torch.randn(4, 4))  # type: ignore[no-any-return]

    def told_apart(self, fake: Tensor) -> Tensor:
        real = judge(self.discriminator(torch.randn(4, 4) + 2), torch.ones(4, 1))
        return real + judge(self.discriminator(fake.detach()), torch.zeros(4, 1))

    def believed(self, fake: Tensor) -> Tensor:
        return judge(self.discriminator(fake), torch.ones(4, 1))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Actor(4, 4), Critic(8, 1)
        self.of_actor, self.of_critic = SGD(self.actor.parameters(), lr=0.01), SGD(self.critic.parameters(), lr=0.01)

    def regret(self, state: Tensor) -> Tensor:
        return -self.critic(torch.cat([state, self.actor(state)], 1)).mean()  # type: ignore[no-any-return]

    def surprise(self, state: Tensor) -> Tensor:
        value = self.critic(torch.cat([state, self.actor(state).detach()], 1))
        return (value - torch.randn(4, 1)).square().mean()  # type: ignore[no-any-return]


# --- trainings: each makes its model, and then trains it round by round ---------------------------------------------------

Training = Iterator[Any]
A, B = ("Discriminator", "loss"), ("Generator", "loss of Generator")


def a_gan(gan: Gan | None = None) -> Training:
    yield (gan := gan or Gan())
    while True:
        fake = gan.fake()
        learn(gan.told_apart(fake), gan.theirs)
        learn(gan.believed(fake), gan.ours)
        yield


def a_gan_whose_generator_has_a_net() -> Training:
    gan = Gan()
    gan.generator = Painter()  # type: ignore[assignment]
    gan.ours = Adam(gan.generator.parameters(), lr=1e-3)
    return a_gan(gan)


def a_gan_with_a_backward_for_each_half() -> Training:
    yield (gan := Gan())
    while True:
        fake = gan.fake()
        judge(gan.discriminator(torch.randn(4, 4)), torch.ones(4, 1)).backward()
        judge(gan.discriminator(fake.detach()), torch.zeros(4, 1)).backward()
        take_step(gan.theirs)
        learn(gan.believed(fake), gan.ours)
        yield


def a_gan_in_a_loop() -> Training:
    """One line calls ``backward()``."""
    yield (gan := Gan())
    while True:
        for loss, optimizer in ((gan.told_apart, gan.theirs), (gan.believed, gan.ours)):
            learn(loss(gan.fake()), optimizer)
        yield


def a_critic_that_steps_often() -> Training:
    yield (gan := Gan())
    while True:
        for _ in range(3):
            learn(gan.discriminator(gan.fake().detach()).mean() - gan.discriminator(torch.randn(4, 4)).mean(), gan.theirs)
        learn(-gan.discriminator(gan.fake()).mean(), gan.ours)
        yield


def a_gan_with_scalers() -> Training:
    """The first steps are skipped: the scale is too high."""
    yield (gan := Gan())
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127) for _ in range(2)]
    while True:
        for loss, optimizer, scaler in zip((gan.told_apart, gan.believed), (gan.theirs, gan.ours), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss(gan.fake())).backward()
            scaler.step(optimizer)
            scaler.update(2.0**100)
        yield


def a_gan_whose_optimizers_are_made_anew() -> Training:
    yield (gan := Gan())
    for number in range(1000):
        fake = gan.fake()
        learn(gan.told_apart(fake), gan.theirs)
        learn(gan.believed(fake), gan.ours)
        if number % 2:
            gan.ours, gan.theirs = Adam(gan.generator.parameters()), Adam(gan.discriminator.parameters())
        yield


class Inside(Gan):
    """Its forward is a step of the training, as Lightning's ``training_step`` is under DDP."""

    generates: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.generates = self.generator

    def fake(self) -> Tensor:
        return self.generates(torch.randn(4, 4))

    def forward(self, noise: Tensor | None = None) -> Any:
        if noise is not None:
            return self.generator(noise)
        fake = self.fake()
        learn(self.told_apart(fake), self.theirs)
        learn(self.believed(fake), self.ours)
        return None


def a_gan_inside_of_a_forward() -> Training:
    yield (gan := Inside())
    while True:
        gan()
        yield


def a_gan_whose_forward_calls_itself() -> Training:
    yield (gan := Inside())
    gan.generates = gan
    while True:
        gan()
        yield


def a_gan_that_is_looked_at_in_between() -> Training:
    yield (gan := Inside())
    while True:
        gan()
        gan.eval()
        with torch.no_grad():
            gan(torch.randn(4, 4))
        gan.train()
        yield


def an_actor_and_a_critic() -> Training:
    yield (both := ActorCritic())
    while True:
        state = torch.randn(4, 4)
        learn(both.surprise(state), both.of_critic)
        learn(both.regret(state), both.of_actor)
        yield


def an_actor_and_a_critic_that_step_in_the_end() -> Training:
    """Both losses go to ``backward()`` before either optimizer steps; the critic's alone reaches the critic."""
    yield (both := ActorCritic())
    while True:
        state = torch.randn(4, 4)
        both.critic.requires_grad_(False)
        both.regret(state).backward()
        both.critic.requires_grad_(True)
        both.surprise(state).backward()
        both.of_actor.step()
        both.of_critic.step()
        both.zero_grad()
        yield


def closures() -> Training:
    yield (both := ActorCritic())

    def step(optimizer: Optimizer, loss: Callable[[Tensor], Tensor]) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            found = loss(torch.randn(4, 4))
            found.backward()
            return found

        optimizer.step(closure)  # type: ignore[arg-type]

    while True:
        step(both.of_critic, both.surprise)
        step(both.of_actor, both.regret)
        yield


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (a_gan, [A, B]),
        (a_gan_whose_generator_has_a_net, [A, ("Painter", "loss of Painter")]),
        (a_gan_with_a_backward_for_each_half, [A, A, B]),
        (a_gan_in_a_loop, [A, B]),
        (a_critic_that_steps_often, [A, A, A, B]),
        (a_gan_with_scalers, [A, B]),
        (a_gan_inside_of_a_forward, [A, B]),
        (a_gan_whose_forward_calls_itself, [A, B]),
        (a_gan_that_is_looked_at_in_between, [A, B]),
        (a_gan_whose_optimizers_are_made_anew, [A, B]),
        (an_actor_and_a_critic, [("Critic", "loss"), ("Actor", "loss of Actor")]),
        (an_actor_and_a_critic_that_step_in_the_end, [("Actor", "loss"), ("Critic", "loss of Critic")]),
        (closures, [("Critic", "loss"), ("Actor", "loss of Actor")]),
    ],
)
@pytest.mark.parametrize("check", ["frame", "async"])
def test_losses_that_take_turns_are_told_apart_by_what_they_train(
    training: Callable[[], Training], expected: list[tuple[str, str]], check: str
) -> None:
    (notebook,) = run(training, lambda model: [model], check=check)
    assert told(notebook)[LEARNT * len(expected) :] == expected * (ROUNDS - LEARNT)


def test_a_gan_with_a_watch_for_each_model() -> None:
    generator, discriminator = run(a_gan, lambda gan: [gan.generator, gan.discriminator])
    assert told(generator) == [("Generator", "loss")] * ROUNDS
    losses = [one for one in told(discriminator) if one != ("Discriminator", "no loss")]
    assert losses[2 * LEARNT :] == [A, B] * (ROUNDS - LEARNT)


def test_a_loss_of_a_model_that_is_not_watched() -> None:
    (notebook,) = run(a_gan, lambda gan: [gan.discriminator])
    assert told(notebook)[2 * LEARNT :] == [A, ("another model", "loss of another model")] * (ROUNDS - LEARNT)


# --- one loss ---------------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def a_sum() -> Training:
    yield (both := ActorCritic())
    while True:
        state = torch.randn(4, 4)
        learn(both.surprise(state) + both.regret(state), both.of_actor, both.of_critic)
        yield


def two_optimizers_of_one_loss() -> Training:
    yield (model := net())
    optimizers = [SGD(part.parameters(), lr=0.01) for part in (model[0], model[2])]
    while True:
        learn(model(torch.randn(4, 4)).square().mean(), *optimizers)
        yield


def one_that_steps_at_times() -> Training:
    yield (model := net())
    first, second = (SGD(part.parameters(), lr=0.01) for part in (model[0], model[2]))
    for number in range(1000):
        learn(model(torch.randn(4, 4)).square().mean(), *([first] if number % 2 else []), second)
        yield


def micro_batches() -> Training:
    """Its last backward is called in another line, as where DDP is told not to reduce."""
    yield (model := net())
    optimizer = SGD(model.parameters(), lr=0.01)
    while True:
        for number in range(4):
            loss = model(torch.randn(4, 4)).square().mean() / 4
            if number < 3:
                loss.backward()
            else:
                loss.backward()
        take_step(optimizer)
        yield


def an_optimizer_of_more_and_more() -> Training:
    yield (model := net())
    for number in range(1000):
        optimizer = SGD(model[2].parameters() if number < 3 else model.parameters(), lr=0.01)
        learn(model(torch.randn(4, 4)).square().mean(), optimizer)
        yield


def another_loss_at_times() -> Training:
    yield (model := net())
    optimizer = SGD(model.parameters(), lr=0.01)
    for number in range(1000):
        loss = model(torch.randn(4, 4)).square().mean() if number % 3 else model(torch.randn(4, 4)).abs().sum()
        learn(loss, optimizer)
        yield


@pytest.mark.parametrize(
    "training",
    [
        a_sum,
        two_optimizers_of_one_loss,
        one_that_steps_at_times,
        micro_batches,
        an_optimizer_of_more_and_more,
        another_loss_at_times,
    ],
)
def test_a_training_with_one_loss(training: Callable[[], Training]) -> None:
    (notebook,) = run(training, lambda model: [model])
    labels = [label for _, label in told(notebook)]
    assert {label for label in labels if label != LOSS_OF_SOME} == {"loss"}
    assert labels.count(LOSS_OF_SOME) <= 1


def test_two_models_with_a_watch_each_and_a_loss_by_which_both_optimizers_step() -> None:
    def training() -> Training:
        yield (both := ActorCritic())
        while True:
            state = torch.randn(4, 4)
            learn(both.surprise(state) + both.regret(state), both.of_actor, both.of_critic)
            learn(both.surprise(state), both.of_critic)
            yield

    for notebook in run(training, lambda both: [both.actor, both.critic]):
        labels = [label for _, label in told(notebook)]
        assert {label for label in labels[LEARNT:] if label != "no loss"} == {"loss"}


# --- helpers ----------------------------------------------------------------------------------------------------------


def run(training: Callable[[], Training], watch: Callable[[Any], list[nn.Module]], **options: Any) -> list[Notebook]:
    torch.manual_seed(0)
    rounds = training()
    made = [watched(model, **options) for model in watch(next(rounds))]
    for _ in range(ROUNDS):
        next(rounds)
    for detector, _ in made:
        detector.remove()
    return [notebook for _, notebook in made]


def told(notebook: Notebook) -> list[tuple[str, str]]:
    """The class and the label of each loss."""
    return [
        (spec.module_class, row.label)
        for table, _ in notebook.sent
        for spec in table.specs
        for row in spec.readings
        if row.kind is Kind.LOSS
    ]
