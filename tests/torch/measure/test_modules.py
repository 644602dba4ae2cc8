"""The names of modules are the user's, whatever wraps the model."""

from __future__ import annotations

from typing import Any

import lightning  # noqa: F401  it stands for the package of a wrapper
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rankwatch.measure.modules import class_name, named_modules, unwrap


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)  # a name that wrappers use too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


def names(model: nn.Module) -> list[str]:
    return [name for named in named_modules(model).values() for name in named.names]


def test_plain() -> None:
    assert names(nn.Sequential(Inner(), nn.ReLU())) == ["", "0", "0.module", "1"]


def test_wrappers_leave_no_trace() -> None:
    plain = nn.Sequential(Inner(), nn.ReLU())
    plain[0] = checkpoint_wrapper(plain[0])
    wrappings: list[Any] = [nn.DataParallel(plain), torch.compile(plain), torch.compile(nn.DataParallel(plain))]
    for wrapped in wrappings:
        assert unwrap(wrapped) is plain
        assert names(wrapped) == ["", "0", "0.module", "1"]


def held(model: nn.Module, name: str, package: str) -> nn.Module:
    """``model`` in a module of a class of this package."""
    holder: nn.Module = type("Holder", (nn.Module,), {"__module__": package})()
    setattr(holder, name, model)
    return holder


@pytest.mark.parametrize("name", ["_forward_module", "_module", "trainable_module"])
def test_what_a_package_puts_around_a_model_is_no_part_of_its_names(name: str) -> None:
    model = nn.Sequential(Inner(), nn.ReLU())
    holder = held(model, name, "lightning")
    holder.original = model  # as Lightning's Fabric has both
    assert unwrap(holder) is model
    assert names(nn.Sequential(holder)) == ["", "0", "0.0", "0.0.module", "0.1"]


def test_a_module_of_the_users_own_keeps_its_names() -> None:
    model = nn.Sequential(Inner(), nn.ReLU())
    assert names(held(model, "_module", __name__)) == ["", "_module", "_module.0", "_module.0.module", "_module.1"]
    more = held(model, "_module", "lightning")
    more.head = nn.Linear(2, 2)
    assert "_module.0" in names(more)


def test_shared_modules_keep_all_their_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"encoder": nn.Sequential(shared), "decoder": nn.Sequential(shared), "head": shared})
    assert named_modules(model)[id(shared)].names == ["encoder.0", "decoder.0", "head"]


def test_a_module_that_holds_itself_ends() -> None:
    model = Inner()
    model._modules["me"] = model
    assert names(model) == ["", "me", "module"]


def test_class_names() -> None:
    assert class_name(nn.Linear(1, 1)) == "Linear"
    swapped = type("FSDPInner", (type("FSDPModule", (), {}), Inner), {})
    assert class_name(swapped()) == "Inner"
