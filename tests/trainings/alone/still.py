"""Trainings that stand still without a word, and such that only look so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainings.case import Training
from trainings.parts import NAN, Root, chain, multiplied
from trainings.truths import healthy, hostile


def data(number: int) -> Tensor:
    return torch.rand(4, 4, generator=torch.Generator().manual_seed(number)) - 0.5


def stepped(when: Callable[[int, float], object], *, bad_from: int = 1 << 30, rate: float = 0.01) -> Training:
    """``when`` is asked after each backward, with the norm of the gradients, whether to step."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), rate)

    def step(number: int) -> None:
        multiplied(model(data(number)), NAN if number >= bad_from else 1.0).square().mean().backward()
        norm = torch.stack([one.grad.norm() for one in model.parameters() if one.grad is not None]).norm().item()
        if when(number, norm):
            optimizer.step()
            optimizer.zero_grad()

    return Training(model, step)


hostile(notice="[NO_STEP .the gradient of 0.weight (Linear) is not finite", batches=50).each(
    an_engine_that_skips_bad_steps=lambda: stepped(lambda number, norm: norm < 1e9, bad_from=10)
)
hostile(notice="[NO_STEP .the gradients that were looked at are finite", batches=50).each(
    a_threshold_that_is_too_low=lambda: stepped(lambda number, norm: norm > 1e-12 and number < 10),
)
hostile(notice="[NO_STEP .no optimizer of this process has ever stepped", batches=140).each(
    a_step_that_was_forgotten=lambda: stepped(lambda number, norm: False),
)


def forgotten(is_detached: bool) -> Training:
    """The optimizer steps upon nothing: the gradients are dropped before, or the loss is made anew from a number."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        loss = model(data(number)).square().mean()
        (torch.tensor(loss.item(), requires_grad=True) if is_detached else loss).backward()
        optimizer.zero_grad()
        optimizer.step()

    return Training(model, step)


hostile(notice="[STOPPED .none of its parameters has a gradient as the optimizer steps", batches=140).each(
    gradients_that_are_dropped_before_the_step=lambda: forgotten(is_detached=False),
    a_loss_that_is_made_anew=lambda: forgotten(is_detached=True),
)


def copied() -> Training:
    """The optimizer got the parameters of the model before it was copied, and has nothing to step upon."""
    before = chain()
    model, optimizer = copy.deepcopy(before), torch.optim.SGD(before.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data(number)).square().mean().backward()
        optimizer.step()

    return Training(model, step)


hostile(notice="[NO_STEP .none of the parameters that SGD steps upon has a gradient", batches=140).each(
    an_optimizer_with_the_parameters_of_a_copy=copied
)


def scheduled(rates: Callable[[int], float]) -> Training:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data(number)).square().mean().backward()
        optimizer.step()
        schedule.step()

    return Training(model, step)


hostile(notice="[STOPPED .the learning rate is 0]", batches=180).each(
    a_schedule_that_ended_long_ago=lambda: scheduled(lambda number: max(0.0, 1 - number / 50))
)
healthy(batches=100).each(
    a_schedule_that_ends_with_the_training=lambda: scheduled(lambda number: max(0.0, 1 - number / 100)),
    a_warm_up_from_0=lambda: scheduled(lambda number: min(1.0, max(0.0, number - 20) / 100)),
)


def of_one_class(decay: float) -> Training:
    """Cross entropy over a single class."""
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, weight_decay=decay)

    def step(number: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data(number)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()

    return Training(model, step)


hostile(notice="[NOTHING_TO_LEARN .loss]", batches=70).each(
    one_class=lambda: of_one_class(0.0), one_class_with_decay=lambda: of_one_class(0.1)
)


@hostile(notice="[STOPPED .all of its gradients are exactly 0]", batches=130)
def a_loss_of_what_was_rounded() -> Training:
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (model(data(number)).round() - 1.0).square().mean().backward()
        optimizer.step()

    return Training(model, step)


# --- what only looks so -----------------------------------------------------------------------------------------------

healthy(batches=200).each(
    gradients_of_48_batches=lambda: stepped(lambda number, norm: number % 48 == 47),
    ever_more_batches_in_a_step=lambda: stepped(lambda number, norm: number in (1, 3, 7, 15, 31, 63, 127)),
)


def by_hand(change: Callable[[nn.Parameter], object]) -> Training:
    """An optimizer is there, but never used."""
    model = chain()
    unused = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        unused.zero_grad()
        model(data(number)).square().mean().backward()
        with torch.no_grad():
            for one in model.parameters():
                change(one)

    return Training(model, step)


def subtract(one: nn.Parameter) -> None:
    assert one.grad is not None
    one.sub_(0.01 * one.grad)


def subtract_unseen(one: nn.Parameter) -> None:
    assert one.grad is not None
    one.data -= 0.01 * one.grad


healthy(batches=300).each(
    updates_by_hand=lambda: by_hand(subtract),
    updates_by_hand_unseen_by_autograd=lambda: by_hand(subtract_unseen),
)


@healthy(batches=200)
def a_model_whose_turn_is_another_ones() -> Training:
    """A discriminator: for a hundred batches only the generator steps, by gradients that come through it."""
    model, other = chain(), nn.Linear(4, 4)
    optimizer, of_other = (torch.optim.SGD(one.parameters(), 0.01) for one in (model, other))

    def step(number: int) -> None:
        for one in (optimizer, of_other):
            one.zero_grad()
        model(other(data(number))).square().mean().backward()
        (optimizer if number < 20 else of_other).step()

    return Training(model, step)


@healthy(batches=220, forwards=1)
def an_image_that_is_trained_through_a_model() -> Training:
    model, image = chain(), nn.Parameter(torch.rand(4, 4))
    optimizer = torch.optim.SGD([image], 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(image).square().mean().backward()
        optimizer.step()

    return Training(model, step)


@healthy(forwards=-1, batches=200)
def fisher_information_at_the_end() -> Training:
    """In eval mode, as elastic weight consolidation has it."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model.train(number < 50)(data(number)).square().mean().backward()
        if number < 50:
            optimizer.step()

    return Training(model, step)


# --- a part that no gradient reaches ----------------------------------------------------------------------------------


def cut(call: Callable[[Any, Tensor], Tensor]) -> Training:
    """An encoder, whose output is handed on, and a head. The optimizer has both."""
    model = Root(call, encoder=nn.Linear(4, 4), pooler=nn.Linear(4, 4), head=nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.001)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data(number)).square().mean().backward()
        optimizer.step()

    return Training(model, step)


def rounded(self: Any, x: Tensor) -> Any:
    made = self.encoder(x).tanh().detach().numpy()
    return self.head(torch.from_numpy(made / (made.std() + 1e-6)))


def in_two(self: Any, x: Tensor) -> Any:
    one, other = self.encoder(x).detach().chunk(2, dim=-1)
    return self.head(self.pooler(torch.cat([other.relu(), one], dim=-1)))


def frozen(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        made = self.encoder(x).relu()
    return self.head(made)


def pooled(self: Any, x: Tensor) -> Any:
    made = self.encoder(x).relu()
    self.norm = self.pooler(made).detach().norm()  # to be logged
    return self.head(made)


def of_two_towers(self: Any, x: Tensor) -> Any:
    made = self.encoder(x - x.mean())
    self.pooler(made)
    return made * self.head(x * 2)


def straight_through(self: Any, x: Tensor) -> Any:
    made = self.encoder(x)
    return self.head(made + (made.round() - made).detach())


hostile(notice="[NO_GRADIENT encoder.weight]", batches=70).each(
    an_encoder_that_is_detached=lambda: cut(lambda self, x: self.head(self.encoder(x).relu().detach())),
    an_encoder_whose_data_go_on=lambda: cut(lambda self, x: self.head(input=self.encoder(x).data.relu())),
    an_encoder_that_goes_through_numpy=lambda: cut(rounded),
    an_encoder_that_is_detached_in_two=lambda: cut(in_two),
)
healthy(batches=100).each(
    an_encoder_that_is_frozen_by_no_grad=lambda: cut(frozen),
    a_pooler_that_nobody_uses=lambda: cut(pooled),
    an_auxiliary_head_between_two_towers=lambda: cut(of_two_towers),
    a_straight_through_estimate=lambda: cut(straight_through),
)
