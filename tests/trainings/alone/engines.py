"""Engines, whose optimizers step upon copies of the parameters; and steps that are skipped for a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from trainings.case import Training
from trainings.parts import NAN, chain, multiplied
from trainings.truths import healthy, hostile

Bad = Callable[[Tensor, int], Tensor]


def data(number: int) -> Tensor:
    return torch.rand(4, 4, generator=torch.Generator().manual_seed(number)) - 0.5


def no_fault(hidden: Tensor, number: int) -> Tensor:
    return hidden


def nan_gradient(hidden: Tensor, number: int) -> Tensor:
    """In batch 13, on the way from the second module to the first one."""
    bad: Tensor = multiplied(hidden, NAN if number == 13 else 1.0)
    return bad


class Net(nn.Module):
    def __init__(self, bad: Bad) -> None:
        super().__init__()
        self.first, self.last, self.bad, self.number = nn.Linear(4, 8), nn.Linear(8, 4), bad, -1

    def forward(self, given: Tensor) -> Tensor:
        return self.last(self.bad(torch.relu(self.first(given)), self.number))  # type: ignore[no-any-return]


class Engine:
    """Keeps copies of 32 bits, as one flat tensor or one for each parameter, and takes the gradients away as they come.

    Args:
        groups: the optimizer is called once for each.
        every: batches in a step.
    """

    def __init__(
        self, model: nn.Module, *, is_flat: bool = True, groups: int = 1, every: int = 1, skips: bool = True
    ) -> None:
        self.parameters = list(model.parameters())
        cuts = [len(self.parameters) * number // groups for number in range(groups + 1)]
        self.groups = [self.parameters[start:end] for start, end in pairwise(cuts)]
        self.copies = [
            [part.detach().float().requires_grad_() for part in self._parts(group, is_flat)] for group in self.groups
        ]
        self.optimizer = torch.optim.AdamW([{"params": copies} for copies in self.copies], 0.01)
        self.sums: dict[int, Tensor] = {}
        self.every, self.skips, self.is_flat, self.skipped = every, skips, is_flat, 0
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda one, number=number: self._take(number, one))

    @staticmethod
    def _parts(tensors: Sequence[Tensor], is_flat: bool) -> Iterator[Tensor]:
        yield from [torch.cat([one.detach().flatten() for one in tensors])] if is_flat else [one.clone() for one in tensors]

    def _take(self, number: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.sums[number] = self.sums.get(number, torch.zeros(())) + parameter.grad.float()
        parameter.grad = None

    @torch.no_grad()
    def step(self, number: int) -> None:
        if (number + 1) % self.every:
            return
        sums, self.sums = self.sums, {}
        if self.skips and not all(bool(one.isfinite().all()) for one in sums.values()):
            self.skipped += 1
            return
        gradients = iter([sums[number] for number in range(len(self.parameters))])
        for group, copies, settings in zip(self.groups, self.copies, list(self.optimizer.param_groups), strict=True):
            for copy, gradient in zip(copies, self._parts([next(gradients) for _ in group], self.is_flat), strict=True):
                copy.grad = gradient
            every_group, self.optimizer.param_groups = self.optimizer.param_groups, [settings]
            self.optimizer.step()
            self.optimizer.param_groups = every_group
            values = torch.cat([copy.flatten() for copy in copies])
            for one, value in zip(group, values.split([one.numel() for one in group]), strict=True):
                one.data.copy_(value.view_as(one))
            for copy in copies:
                copy.grad = None


def engine(bad: Bad = no_fault, dtype: torch.dtype = torch.float32, **options: int) -> Training:
    model = Net(bad).to(dtype)
    made = Engine(model, **options)  # type: ignore[arg-type]

    def step(number: int) -> None:
        model.number = number
        model(data(number).to(dtype)).float().square().mean().backward()
        made.step(number)

    return Training(model, step)


healthy(batches=40).each(
    an_engine_with_flat_copies=engine,
    an_engine_with_copies_of_32_bits=lambda: engine(dtype=torch.bfloat16, is_flat=False),
    an_engine_that_accumulates=lambda: engine(every=4),
    an_engine_that_steps_once_a_group=lambda: engine(groups=2),
)
hostile(notice="[SKIPPED_STEP first.bias.grad]", batches=20).each(
    an_engine_that_skips_a_nan=lambda: engine(nan_gradient),
    an_engine_of_16_bits_that_skips_a_nan=lambda: engine(nan_gradient, torch.bfloat16, is_flat=False),
)
hostile(notice="[SKIPPED_STEP first.bias.grad]", batches=32).each(
    an_engine_that_skips_a_nan_among_others=lambda: engine(nan_gradient, every=2),
)
hostile("first", "gradient", batch=13, label="weight.grad", batches=20).each(
    an_engine_that_takes_a_nan=lambda: engine(nan_gradient, skips=False),
)


def engine_that_goes_wrong(in_batch: Callable[[Tensor, Engine, int], Tensor]) -> Training:
    """``in_batch``: returns the loss of a batch, and may touch the engine."""
    model = Net(no_fault)
    made = Engine(model, skips=False)

    def step(number: int) -> None:
        in_batch(model(data(number)).square().mean(), made, number).backward()
        made.step(number)

    return Training(model, step)


def nan_in_loss(loss: Tensor, made: Engine, number: int) -> Tensor:
    return loss * (NAN if number == 13 else 1.0)


def decay_too_high(loss: Tensor, made: Engine, number: int) -> Tensor:
    made.optimizer.param_groups[0] |= {"lr": 1e20, "weight_decay": 1e20} if number == 13 else {}
    return loss


hostile("", "invalid", batch=13, label="loss", batches=20, fingerprints=0).each(
    an_engine_with_a_nan_loss_and_no_collector=lambda: engine_that_goes_wrong(nan_in_loss),
)
hostile(
    "first", "weight", "inf", batch=14, label="weight", batches=20, says="optimizer step", never="no optimizer that was seen"
).each(
    an_engine_whose_step_overflows=lambda: engine_that_goes_wrong(decay_too_high),
)


def skipping(loss: Callable[[Tensor, int], Tensor], bad: Bad = no_fault, *, every: int = 1) -> Training:
    """A loop that looks at the norm, and takes no step that is not finite."""
    model = Net(bad)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        model.number = number
        loss(model(data(number)), number).backward()
        if (number + 1) % every:
            return
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)


def forgetting(loss: Callable[[Tensor, int], Tensor]) -> Training:
    """A loop that goes on to the next batch where a loss is not finite, and does not clear its gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        value = loss(model(data(number)), number)
        value.backward()
        if value.isfinite():
            optimizer.step()
            optimizer.zero_grad()

    return Training(model, step)


def mean(output: Tensor, number: int) -> Tensor:
    return output.square().mean()


def nan_loss(output: Tensor, number: int) -> Tensor:
    return mean(output, number) * (NAN if number == 9 else 1.0)


def steep(output: Tensor, number: int) -> Tensor:
    """Its gradient is 0 times inf in batch 9, at 0."""
    return (output * (0.0 if number == 9 else 1.0)).square().sum().sqrt()


hostile(notice="[SKIPPED_STEP .loss]", batches=20).each(
    a_loop_that_skips_a_nan_loss=lambda: skipping(nan_loss),
    a_loop_that_skips_a_nan_loss_in_a_step_of_two=lambda: skipping(nan_loss, every=2),
)
hostile("", "gradient", batch=9, label="grad_output", batches=20, never="that changes .grad").each(
    gradients_that_stay_from_a_step_that_was_skipped=lambda: forgetting(nan_loss),
)
hostile(notice="[SKIPPED_STEP .grad_output]", batches=20).each(
    a_loop_that_skips_a_steep_loss=lambda: skipping(steep),
)


class Rooted(nn.Module):
    """Divides by a norm, whose gradient is not a number at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, bias=False), nn.Linear(8, 4)

    def forward(self, given: Tensor) -> Tensor:
        hidden = self.first(given)
        return self.last(hidden / (1.0 + hidden.square().sum(1, keepdim=True).sqrt()))  # type: ignore[no-any-return]


@hostile(notice="[SKIPPED_STEP first.weight.grad]", batches=20)
def a_loop_that_skips_a_root_of_0() -> Training:
    """What is bad follows from the data: run again, it recurs."""
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        model(data(number) * (0.0 if number == 9 else 1.0)).square().mean().backward()
        if all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.grad is not None):
            optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)


# --- what only looks so -----------------------------------------------------------------------------------------------


@healthy(batches=60, forwards=-1)
def steps_of_ever_other_lengths() -> Training:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        for _ in range(1 + 3 * (number % 5 == 4)):
            model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, step)


@healthy(batches=60)
def a_latent_that_is_trained_before_its_model() -> Training:
    """A tensor of no model has an optimizer, which steps first; the weights change by the model's own."""
    model, latent = chain(), torch.zeros(4, 4, requires_grad=True)
    of_latent, own = torch.optim.Adam([latent], 0.01), torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        model(data(number) + latent).square().mean().backward()
        for one in (of_latent, own) if number >= 10 else (of_latent,):
            one.step()
        for one in (of_latent, own):
            one.zero_grad()

    return Training(model, step)
