"""Modules of a watched model that are replaced: the new ones are watched, and the old ones are freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from notebook import learn, ones, sgd, unwatch, watched
from rankwatch.hook import backward
from trainings.parts import Root


def net() -> Root:
    blocks = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
    parts = {"first": nn.Linear(4, 4), "blocks": blocks, "last": nn.Linear(4, 2)}
    return Root(lambda self, x: self.last(self.blocks["a"](self.first(x))), **parts)


def train(model: nn.Module) -> None:
    learn(model(ones()).sum(), sgd(model))


def by_name(model: Any) -> nn.Module:
    old, model.first = model.first, nn.Linear(4, 4)
    return old  # type: ignore[no-any-return]


def by_table(model: Any) -> nn.Module:
    old, model._modules["first"] = model.first, nn.Linear(4, 4)  # as torch.ao.quantization does: torch tells nobody
    return old  # type: ignore[no-any-return]


def by_deletion(model: Any) -> nn.Module:
    old = model.first
    del model.first
    model.first = nn.Linear(4, 4)
    return old  # type: ignore[no-any-return]


def below(model: Any) -> nn.Module:
    old = model.blocks["a"][0]
    model.blocks["a"] = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return old  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", ["frame", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize("replace", [by_name, by_table, by_deletion, below])
def test_modules_that_were_replaced_are_freed(replace: Callable[[Any], nn.Module], check: str) -> None:
    model = net()
    detector, notebook = watched(model, check=check)
    train(model)
    names = {frame.spec.module for frame in notebook.frames(0)}
    replaced: list[weakref.ref[Any]] = []
    for _ in range(20):
        old = replace(model)
        replaced += [weakref.ref(old), weakref.ref(old.weight)]
        del old
        train(model)
    gc.collect()
    assert [one() for one in replaced] == [None] * 40
    assert {frame.spec.module for frame in notebook.frames()} == names
    assert (len(detector._hooks.modules), detector.position.batch, detector.fault) == (7, 20, "")
    assert len(detector._recorder._specs) <= 7


@pytest.mark.slow
def test_hooks_of_what_was_replaced_do_not_add_up() -> None:
    model = net()
    detector, _ = watched(model, gradients=True, fingerprints=1)
    for _ in range(200):
        by_name(model)
        train(model)
    gc.collect()
    train(model)
    parameters = detector._gradients._parameters
    assert len(detector._fingerprints._handles) == 7
    assert len(parameters._hooked) <= 3 * backward.FEW_PARAMETERS
    assert [len(module._load_state_dict_post_hooks) for module in model.modules()] == [1] * 7
    assert (detector.position.batch, detector.fault) == (200, "")


def test_a_module_that_is_wrapped_in_its_place_is_watched_by_its_new_name() -> None:
    model = net()
    detector, notebook = watched(model)
    train(model)
    model.first = nn.Sequential(model.first, nn.Identity())
    train(model)
    names = [frame.spec.module for frame in notebook.frames()]
    assert names[:3] == ["first.0", "first.1", "first"]
    assert not detector.fault


def test_modules_that_change_places_have_their_new_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    _, notebook = watched(model)
    train(model)
    model._modules["0"], model._modules["1"] = model[1], model[0]
    train(model)
    found = [(frame.spec.module, frame.spec.module_class) for frame in notebook.frames()]
    assert found[:2] == [("0", "Identity"), ("1", "Linear")]


def test_a_model_is_freed_after_its_watch() -> None:
    model = net()
    notebook = watched(model, gradients=True)[1]
    train(model)
    freed: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(model.first.weight)]
    unwatch()
    assert model._forward_hooks == {}
    notebook.detector = None
    del model
    gc.collect()
    assert [one() for one in freed] == [None, None]
