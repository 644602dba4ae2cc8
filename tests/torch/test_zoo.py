"""Many transformers models: a healthy training is unchanged, and a module that becomes non-finite is named."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwatch

pytest.importorskip("transformers", reason="the zoo's models are those of transformers")

from notebook import learn, unwatch, watched
from zoo import ZOO, Species

pytestmark = pytest.mark.usefixtures("one_thread")

CLEAN = 3
"""Healthy batches before the poisoned one."""

LONG = 200
"""Batches of a long training."""

CULPRIT = re.compile(
    rf"rank 0 of 1 \(.+\), batch {CLEAN}: (?P<name>\S+) \((?P<cls>\w+)(, also (?P<aliases>.+))?\), output\S*: (?P<state>\w+)"
)


# --- poison -----------------------------------------------------------------------------------------------------------


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` in the same containers, with each floating tensor in it that has elements changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() and value.numel() else value
    if isinstance(value, Mapping):
        return type(value)(**{key: replaced(part, change) for key, part in value.items()})
    if isinstance(value, (tuple, list)):
        parts = [replaced(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


@dataclass(frozen=True)
class Spot:
    """The element that turns bad: one element of one floating tensor that a module returns."""

    module: str
    tensor: int
    element: int


def spots(species: Species) -> list[Spot]:
    """One for each tensor that a module returns in batch ``CLEAN``, at an element drawn at random."""
    model = species.make()
    found: dict[tuple[str, int], Spot] = {}
    draw = random.Random(0)

    def note(name: str, output: Any) -> None:
        tensors: list[Tensor] = []
        replaced(output, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        for index, tensor in enumerate(tensors):
            found.setdefault((name, index), Spot(name, index, draw.randrange(tensor.numel())))

    losses = train(model, species)
    for _ in range(CLEAN):
        next(losses)
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
    next(losses)
    return list(found.values())


class Poison:
    """A forward hook that, once armed, turns an output bad."""

    def __init__(self, spot: Spot, value: float) -> None:
        self.armed = False
        self._spot = spot
        self._value = value

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.armed:
            return None
        number = count()
        return replaced(output, lambda tensor: self._spoil(tensor) if next(number) == self._spot.tensor else tensor)

    def _spoil(self, tensor: Tensor) -> Tensor:
        spoiled = tensor.flatten().clone()
        index = self._spot.element % tensor.numel()
        # Not just written, which would pass for a mask; nor added, as a loss with finite gradients is harmless.
        spoiled[index] = (tensor.flatten()[index].abs() + 1) * self._value
        return spoiled.view(tensor.shape)


# --- training ---------------------------------------------------------------------------------------------------------


def train(model: nn.Module, species: Species) -> Iterator[float]:
    """Trains without end, one batch at each ``next``, and yields the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in count():
        loss = model(**species.feed(number)).loss
        learn(loss, optimizer)
        yield loss.item()


def names_of(model: nn.Module, name: str) -> set[str]:
    """All the names of a module, as reports write them."""
    module = model.get_submodule(name)
    return {other or "(root)" for other, same in model.named_modules(remove_duplicate=False) if same is module}


def check_culprit(error: BaseException, model: nn.Module, name: str, value: float) -> None:
    found = CULPRIT.fullmatch(str(error))
    assert found, str(error)
    named = {found["name"], *(found["aliases"] or found["name"]).split(", ")}
    assert (named, found["cls"]) == (names_of(model, name), type(model.get_submodule(name)).__name__)
    assert found["state"] == ("nan" if math.isnan(value) else "inf")


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of ours went wrong: a watch that has a bug logs it, switches itself off and says no more."""
    ours = [record for record in caplog.records if record.name.partition(".")[0] == "rankwatch"]
    assert [record.getMessage() for record in ours if record.levelno >= logging.WARNING] == []


# --- eager ------------------------------------------------------------------------------------------------------------

SAMPLE = ["modernbert", "llama", "bart", "mixtral", "mamba2", "jamba", "vit", "whisper", "llava"]
"""One model of each family."""


@pytest.mark.parametrize(
    ("species", "seed"),
    [
        pytest.param(
            species, seed, id=f"{species.name}-{seed}", marks=pytest.mark.slow if seed or species.name not in SAMPLE else ()
        )
        for species in ZOO
        for seed in (0, 1)
    ],
)
def test_a_module_that_turns_bad_is_named(species: Species, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(f"{species.name} {seed}")
    spot = draw.choice(spots(species))
    value = draw.choice([math.inf, -math.inf, math.nan])
    model, unwatched = species.make(), species.make()
    poison = Poison(spot, value)
    model.get_submodule(spot.module).register_forward_hook(poison)  # before our hooks, which must see the poisoned output
    losses, expected = train(model, species), train(unwatched, species)

    with rankwatch.watch(model):
        assert [next(losses) for _ in range(CLEAN)] == [next(expected) for _ in range(CLEAN)]
        poison.armed = True
        with pytest.raises(rankwatch.OverflowDetected) as caught:
            next(losses)

    check_culprit(caught.value, model, spot.module, value)
    check_log(caplog)


@pytest.mark.slow
@pytest.mark.parametrize("species", ZOO, ids=lambda species: species.name)
def test_a_long_healthy_training_is_left_in_peace(species: Species) -> None:
    model = species.make()
    detector, notebook = watched(model)
    losses = train(model, species)
    for _ in range(LONG):
        next(losses)
    unwatch()
    assert (detector.fault, notebook.trips, notebook.notices) == ("", [], [])
    assert sorted({summary.batch for _, summary in notebook.batches}) == list(range(LONG))


# --- compiled ---------------------------------------------------------------------------------------------------------


class TracedPoison:
    """A forward hook that adds ``flag`` to all that a module returns: 0, until it is filled with something bad.

    A hook with a Python flag would be compiled into the healthy batch, and the bad batch would need a second graph.
    """

    def __init__(self) -> None:
        self.flag = torch.zeros(())

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return replaced(output, lambda tensor: tensor + self.flag)


def compiled(model: nn.Module) -> nn.Module:
    wrapper: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


def warmed_up(species: Species) -> nn.Module:
    """transformers takes a lock in a model's first forward, in which no compiler can follow it."""
    model = species.make()
    with torch.no_grad():
        model(**species.feed(0))
    return model


def _skip_if_never_compiled(species: Species) -> None:
    """Skips a model that does not compile to a single graph even without a watch."""
    torch._dynamo.reset()
    try:
        next(train(compiled(warmed_up(species)), species))
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"not to be compiled in one graph: {str(error).strip().splitlines()[0]}")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("species", [s for s in ZOO if s.name in SAMPLE], ids=lambda species: species.name)
def test_a_module_that_turns_bad_in_a_compiled_model_is_named(species: Species, caplog: pytest.LogCaptureFixture) -> None:
    unwatched = train(warmed_up(species), species)  # nor compiled
    draw = random.Random(species.name)
    spot = draw.choice(spots(species))
    value = draw.choice([math.inf, -math.inf, math.nan])
    model, poison = warmed_up(species), TracedPoison()
    model.get_submodule(spot.module).register_forward_hook(poison)

    with rankwatch.watch(model):
        losses = train(compiled(model), species)
        try:
            healthy = [next(losses) for _ in range(CLEAN)]
        except torch._dynamo.exc.TorchDynamoException:
            _skip_if_never_compiled(species)
            raise
        assert healthy == pytest.approx([next(unwatched) for _ in range(CLEAN)], rel=1e-4)
        poison.flag.fill_(value)
        with pytest.raises(rankwatch.OverflowDetected) as caught:
            next(losses)

    check_culprit(caught.value, model, spot.module, value)
    check_log(caplog)
