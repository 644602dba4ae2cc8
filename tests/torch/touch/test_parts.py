"""The parts of a module are found, whatever its attributes are called, and such a module is watched as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rankwatch
from rankwatch.errors import OverflowDetected
from rankwatch.touch.parts import buffers_in, modules_in, parameters_in

METHODS = "buffers", "parameters", "modules", "children", "named_modules", "named_buffers", "named_parameters"


class Net(nn.Module):
    """``name``: what a list of the module is called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.is_bad = False
        setattr(self, name, [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.relu(self.first(x)))
        found: torch.Tensor = self.last(h / torch.zeros(1) if self.is_bad else h)
        return found


def train(net: Net, **options: Any) -> None:
    optimizer = torch.optim.SGD([*net.first.parameters(), *net.last.parameters()], lr=0.1)
    with rankwatch.watch(net, capsule="off", **options):
        for batch in range(6):
            net.is_bad = batch == 4
            optimizer.zero_grad()
            net(torch.randn(8, 4)).mean().backward()
            optimizer.step()


def test_each_part_comes_once_in_the_order_of_torch() -> None:
    shared = nn.BatchNorm1d(4)
    tied = nn.Linear(4, 4)
    root = nn.ModuleList(
        [nn.Sequential(shared, tied), nn.LSTM(4, 4), shared, nn.ModuleDict({"again": tied}), nn.MultiheadAttention(4, 2)]
    )
    root.register_module("none", None)
    for ours, of_torch in (
        (modules_in, nn.Module.modules),
        (parameters_in, nn.Module.parameters),
        (buffers_in, nn.Module.buffers),
    ):
        assert list(map(id, ours(root))) == list(map(id, of_torch(root)))


@pytest.mark.parametrize("name", METHODS)
def test_a_module_with_an_attribute_of_a_methods_name_is_watched(name: str) -> None:
    with pytest.raises(OverflowDetected, match="batch 4: last"):
        train(Net(name))


@pytest.mark.parametrize("name", METHODS)
def test_its_bad_step_is_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    net = Net(name)
    train(net, on_bad_step="skip")
    assert "was left out" in caplog.text
    assert net.norm.running_mean is not None
    assert all(value.isfinite().all() for value in (*net.first.parameters(), net.norm.running_mean))
