"""Buffers that nobody has written since to_empty() or torch.empty()."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from notebook import learn, sgd, watched
from rankwatch.hook.unwritten import remember_empty
from rankwatch.shared.types.notice import NEVER_WRITTEN, NoticeKind, describe_notice


class Rotary(nn.Module):
    angles: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache.copy_(x[0].detach())
        turned: Tensor = self.linear(x) * self.angles.cos()
        return turned


@pytest.fixture(autouse=True)
def _memory_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is zero on most machines, and on some days."""
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: torch.full_like(like, 0.5, **options))


def told(initialise: Callable[[Rotary], object]) -> list[str]:
    with torch.device("meta"):
        model = Rotary()
    model.to_empty(device="cpu")
    model.linear.reset_parameters()
    initialise(model)
    return noticed(model)


def noticed(model: nn.Module) -> list[str]:
    detector, notebook = watched(model)
    for _ in range(3):
        learn(model(torch.randn(2, 4)).square().mean(), sgd(model))
    detector.remove()
    return [describe_notice(one) for one in notebook.notices if one.kind is NoticeKind.BUFFER]


def test_a_table_that_nobody_wrote_is_told_once_and_what_the_forward_writes_is_not() -> None:
    assert told(lambda model: None) == [f"a bad buffer: (root) (Rotary), angles: {NEVER_WRITTEN}"]


@pytest.mark.parametrize(
    "initialise",
    [
        lambda model: model.angles.copy_(torch.arange(4.0)),
        lambda model: model.angles.data.copy_(torch.arange(4.0)),  # which tells no version
        lambda model: model.register_buffer("angles", torch.arange(4.0), persistent=False),
        lambda model: (
            model.load_state_dict(Rotary().state_dict() | {"angles": torch.ones(4)}, strict=False) and model.angles.zero_()
        ),
    ],
    ids=["in place", "by .data", "made anew", "zeros"],
)
def test_a_table_that_was_written_is_not_told(initialise: Callable[[Rotary], object]) -> None:
    assert told(initialise) == []


def test_memory_that_is_zero_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    assert told(lambda model: None) == []


def test_a_copy_of_a_table_that_nobody_wrote_is_told() -> None:
    assert told(lambda model: setattr(model, "angles", model.angles.clone())) != []  # as a move to a device makes one


class Scaled(nn.Module):
    """Of its scales, four are never written, as far as the source says."""

    late: Tensor

    def __init__(self, given: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("lost", torch.empty(4), persistent=False)
        self.register_buffer("moved", torch.empty(4).to("cpu").view(4))
        self.register_buffer(
            "spread",
            tensor=torch.empty(
                4,
            ),
        )
        nn.Module.register_buffer(self, "unseen", torch.empty(4))
        self.register_buffer("filled", torch.empty(4).fill_(2.0))
        self.register_buffer("table", torch.full((4,), 0.5))
        self.register_buffer("late", torch.empty(4))
        self.register_buffer("none", None)
        scales = torch.empty(4)
        self.register_buffer("named", scales)
        perhaps = torch.full((4,), 0.5)
        if given is not None:
            perhaps = torch.empty(4)
        self.register_buffer("perhaps", perhaps)
        for each in [torch.full((4,), 0.5)]:
            self.register_buffer("each", each)
        if given is None:
            given = torch.full((4,), 0.5)
        self.register_buffer("given", given)
        written = torch.empty(4)
        self.register_buffer("by_name", written)
        written.fill_(2.0)
        self.late.copy_(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.lost * self.moved * self.spread * self.filled * self.table * self.late
        return scaled


def test_a_buffer_that_torch_empty_made_is_told_where_nobody_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            torch, "empty", lambda size, **options: torch.full((size,) if type(size) is int else size, 0.5, **options)
        )
        model = Scaled()
    text = "a bad buffer: (root) (Scaled), {}: " + NEVER_WRITTEN
    names = ["lost", "moved", "spread", "named"] if sys.version_info >= (3, 11) else []
    assert noticed(model) == [text.format(name) for name in names]


class Counting(nn.Linear):
    """torch registers the new buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


def test_a_compiled_forward_replaces_a_buffer_as_ever() -> None:
    remember_empty()
    model = Counting()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(3):
        compiled(torch.rand(2, 4))
    assert int(model.calls) == 3
