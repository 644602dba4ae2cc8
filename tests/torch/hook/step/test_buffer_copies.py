"""Buffers that a forward has written have their values again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rankwatch.hook.step.buffer_copies import SMALL, BufferCopies
from rankwatch.measure.modules import named_modules


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.table: Tensor
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("table", torch.arange(SMALL + 1.0))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        self.table[0] += 1
        return x


def _modules(model: nn.Module) -> Any:
    return SimpleNamespace(modules=list(named_modules(model).values()))


def test_each_way_of_writing_is_undone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), _Counts())
    copies = BufferCopies(_modules(model))
    model(torch.randn(4, 3))
    copies.keep(trusts_versions=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = model[1].seen
    model(torch.full((4, 3), float("nan")))
    restored = copies.put_back()
    assert set(restored) == {"0.running_mean", "0.running_var", "0.num_batches_tracked", "1.seen", "1.table"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].seen is seen
    assert copies.put_back() == ()


def test_what_was_written_between_two_copies_is_kept() -> None:
    model = _Counts()
    copies = BufferCopies(_modules(model))
    copies.keep(trusts_versions=True)
    model(torch.zeros(3))
    copies.keep(trusts_versions=True)
    model(torch.zeros(3))
    copies.put_back()
    assert (model.seen[0].item(), model.table[0].item()) == (1, 1)
