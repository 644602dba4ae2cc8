"""What goes bad late, in a batch of which the root alone is measured, has the report of ``every=1``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import rankwatch
from mechanisms import TABLES, Mechanism
from models import Calls
from notebook import Notebook, learn, sgd, unwatch, watched
from rankwatch.api import registry
from rankwatch.errors import TrainingAborted
from rankwatch.shared.types.tuning import Tuning
from rankwatch.shared.words.cause import advise, classify
from trainings.parts import Root

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

BAD = 61
"""The batch that goes bad: no full one, and its number is odd, as the costs are taken in turns before K is proposed."""

PROPOSED = Tuning(pace=64, pace_from=40)
"""K, as a collector proposes it."""

NOT_COMPARED = "time", "frames", "grown", "weights"
"""Of a trip. Weights are measured in fewer batches: in which one a weight was last finite is known less well."""


@dataclass
class Late:
    """``model(*given(number))`` is a batch, of which ``loss_of`` makes the loss. ``spoil`` is called before ``BAD``."""

    model: nn.Module
    spoil: Callable[[], object]
    given: Callable[[int], tuple[Any, ...]] = lambda number: (torch.ones(3, 4),)
    loss_of: Callable[[Any], Tensor] = lambda output: output.square().mean()


class Spoilt:
    now = False

    def __call__(self) -> None:
        self.now = True

    def __rmul__(self, factor: float) -> float:
        """``factor * spoilt`` is 1 as long as nothing is."""
        return factor if self.now else 1.0


def reported(build: Callable[[], Late], tuning: Tuning | None, **options: Any) -> dict[str, Any]:
    """All that a report says of the trip."""
    torch.manual_seed(0)
    late = build()
    detector, notes = watched(late.model, **options)
    registry.remember(detector)  # type: ignore[arg-type]  # detect_overflow finds it there
    if tuning is not None:
        detector.tune(tuning)
    optimizer = sgd(late.model, 1e-3)
    try:
        for number in range(BAD + 2):
            if number == BAD:
                late.spoil()
            learn(late.loss_of(late.model(*late.given(number))), optimizer)
        detector.remove()
    except TrainingAborted:
        pass
    finally:
        unwatch()
        registry.forget(detector)  # type: ignore[arg-type]
    assert not notes.faults
    full = {summary.batch for table, summary in notes.sent if any(spec.module for spec in table.specs)} - {BAD}
    assert max(full) == (BAD - 1 if tuning is None else 38)
    return said(notes)


def said(notes: Notebook) -> dict[str, Any]:
    trip, closeup = notes.trip, notes.closeups[0]
    told = {field.name: getattr(trip, field.name) for field in fields(trip) if field.name not in NOT_COMPARED}
    found = {field.name: getattr(closeup, field.name) for field in fields(closeup) if field.name != "capsule"}
    # In a wider precision the model runs up to the module, and not the module alone.
    found["precision"] = [(one.dtype, one.state, float(f"{one.abs_max:.4g}")) for one in closeup.precision]
    cause, evidence = classify(trip)
    evidence = evidence if not trip.weights else evidence.partition("last seen finite")[0]
    named = {"cause": cause, "evidence": evidence, "try": advise(cause, trip, closeup), "frame": repr(trip.frame)}
    return {**named, **told, **found}


def check(build: Callable[[], Late]) -> None:
    full, late = reported(build, None), reported(build, PROPOSED, budget=0.021)  # not the default, which tests switch off
    assert full["position"].batch == BAD
    assert {name: repr(value) for name, value in late.items()} == {name: repr(value) for name, value in full.items()}


@pytest.mark.parametrize(
    ("name", "one"), [pytest.param(name, one, id=name) for rows in TABLES.values() for name, one in rows.items()]
)
def test_a_mechanism(name: str, one: Mechanism) -> None:
    """The output goes into no loss, if it has a gradient. Else it is a measure, by which the loss is weighted."""

    def compute(self: Root, x: Tensor, given: Tensor) -> Any:
        logits = self.body(x)
        has_gradient = given.is_floating_point() and name != "out="  # which knows no gradients
        made = self.block(given + 0 * logits.sum() if has_gradient else given)
        return logits, tree_map(lambda value: torch.stack([value, value]), made)  # a single number might be the loss

    def loss_of(both: Any) -> Tensor:
        logits, made = both
        measures = [one for one in tree_leaves(made) if not one.requires_grad]
        weight = sum([one.sum() for one in measures], torch.ones(()))
        loss: Tensor = (logits.square() * weight).mean()
        return loss

    def build() -> Late:
        spoilt = Spoilt()
        block = nn.Sequential(Calls(lambda x: one.call(x) if spoilt.now else x * 1), nn.Identity())
        model = Root(compute, body=nn.Linear(4, 4), block=block)
        given = {True: one.given, False: torch.ones_like(one.given)}
        return Late(model, spoilt, lambda number: (torch.ones(2, 4), given[number == BAD]), loss_of)

    check(build)


# --- places, and what is around them ---------------------------------------------------------------------------------------


def two(compute: Callable[..., Any], **parts: nn.Module) -> Root:
    return Root(compute, **{"first": nn.Linear(4, 4), "last": nn.Linear(4, 4), **parts})


def layers(*between: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 4))


def between_modules() -> Late:
    spoilt = Spoilt()
    return Late(two(lambda self, x: self.last(self.first(x) * (3e38 * spoilt) * 10)), spoilt)


def a_draw() -> Late:
    spoilt = Spoilt()
    return Late(layers(nn.Dropout(0.5), Calls(lambda x: x / x if spoilt.now else x)), spoilt)


def a_mark() -> Late:
    spoilt = Spoilt()

    def compute(self: Root, x: Tensor) -> Any:
        scores = self.first(x)
        rankwatch.detect_overflow(scores / (0 * spoilt), "scores")
        return self.last(scores)

    return Late(two(compute), spoilt)


def data() -> Late:
    return Late(layers(), Spoilt(), lambda number: (torch.tensor([[1.0, 2.0, 3.0, torch.nan if number == BAD else 4.0]]),))


def data_of_a_dict() -> Late:
    model = two(lambda self, batch: {"logits": self.last(self.first(batch["x"]))})

    def given(number: int) -> tuple[Any, ...]:
        return ({"x": torch.full((3, 4), torch.inf if number == BAD else 1.0)},)

    return Late(model, Spoilt(), given, lambda output: output["logits"].square().mean())


def a_weight() -> Late:
    model = layers()
    return Late(model, lambda: model[1].weight.detach()[0].fill_(torch.nan))


def a_row_of_an_embedding() -> Late:
    model = Root(lambda self, tokens: self.last(self.table(tokens)), table=nn.Embedding(8, 4), last=nn.Linear(4, 4))

    def given(number: int) -> tuple[Tensor]:
        return (torch.tensor([[1, 2, 3 if number == BAD else 4]]),)

    return Late(model, lambda: model.table.weight.detach()[3].fill_(torch.nan), given)


def a_buffer() -> Late:
    model = layers(nn.BatchNorm1d(4, momentum=0.0))
    model[1].train(mode=False)
    model[1].train = lambda mode=True: model[1]
    return Late(model, lambda: model[1].running_mean.fill_(torch.nan))


def a_loss() -> Late:
    spoilt = Spoilt()
    return Late(layers(), spoilt, loss_of=lambda output: (output - output.detach() * spoilt.now).log().mean().abs())


def a_loss_of_an_attribute() -> Late:
    spoilt = Spoilt()

    def compute(self: Root, x: Tensor) -> Any:
        hidden = self.first(x)
        self.aside = self.last(hidden).sum() / (0 * spoilt)
        return hidden

    model = two(compute)
    return Late(model, spoilt, loss_of=lambda output: output.square().mean() + model.aside)


def a_gradient() -> Late:
    spoilt = Spoilt()
    return Late(layers(Calls(lambda x: (x * 0).abs().sqrt() + x if spoilt.now else x * 1)), spoilt)


def a_gradient_of_the_loss() -> Late:
    spoilt = Spoilt()
    return Late(layers(), spoilt, loss_of=lambda output: (output * (0 * spoilt)).square().sum().sqrt())


def a_gradient_that_is_chosen_away_in_the_forward() -> Late:
    spoilt = Spoilt()
    return Late(layers(Calls(lambda x: torch.where(x * 0 == 0, x, x / (x * 0)) if spoilt.now else x * 1)), spoilt)


def an_output_that_no_loss_sees() -> Late:
    spoilt = Spoilt()

    def compute(self: Root, x: Tensor) -> Any:
        return {"y": self.first(x), "hidden": self.last(x) / (0 * spoilt)}

    return Late(two(compute), spoilt, loss_of=lambda output: output["y"].square().mean())


def a_module_that_is_called_twice() -> Late:
    spoilt = Spoilt()

    def compute(self: Root, x: Tensor) -> Any:
        return self.last(self.square(self.square(self.first(x)) * (1e30 * spoilt)))

    return Late(two(compute, square=Calls(lambda x: x * x)), spoilt)


def a_checkpoint() -> Late:
    spoilt = Spoilt()
    block = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: x / (0 * spoilt)))
    return Late(two(lambda self, x: self.last(checkpoint(self.first, x, use_reentrant=False)), first=block), spoilt)


def autocast() -> Late:
    spoilt = Spoilt()

    def compute(self: Root, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(self.first(x) * (3e38 * spoilt) * 10).float()

    return Late(two(compute), spoilt)


def numbers_of_numpy() -> Late:
    spoilt = Spoilt()
    return Late(layers(Calls(lambda x: x + torch.from_numpy(np.full(4, 0 * spoilt, np.float32)).log())), spoilt)


def a_mask_of_a_whole_row() -> Late:
    spoilt = Spoilt()

    def compute(self: Root, x: Tensor) -> Any:
        hidden = self.first(x)
        scores = hidden @ hidden.t()
        return self.last((scores + torch.tensor([[0.0], [-torch.inf if spoilt.now else 0.0], [0.0]])).softmax(-1) @ x)

    return Late(two(compute), spoilt)


def a_recurrent_layer() -> Late:
    spoilt = Spoilt()
    model = two(lambda self, x: self.last(self.first(x / (0 * spoilt))[0]), first=nn.LSTM(4, 4))
    return Late(model, spoilt, lambda number: (torch.ones(2, 3, 4),))


PLACES = (
    between_modules, a_draw, a_mark, data, data_of_a_dict, a_weight, a_row_of_an_embedding, a_buffer, a_loss,
    a_loss_of_an_attribute, a_gradient, a_gradient_of_the_loss, a_gradient_that_is_chosen_away_in_the_forward,
    an_output_that_no_loss_sees, a_module_that_is_called_twice, a_checkpoint, autocast, numbers_of_numpy,
    a_mask_of_a_whole_row, a_recurrent_layer,
)  # fmt: skip


@pytest.mark.parametrize("build", PLACES, ids=lambda build: build.__name__)
def test_a_place(build: Callable[[], Late]) -> None:
    check(build)
