"""What ends a rerun before its end is a note, and nothing of it comes out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Calls
from rankwatch.rerun.careful import Careful, Stopped
from rankwatch.rerun.engine import Ran, Rerun
from rankwatch.rerun.forward import Forward
from rankwatch.rerun.limit import Limit

X = torch.ones(2, 2)


class Model(nn.Module):
    """A layer, then what a function makes of its output."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.then = Calls(call)

    def forward(self, x: Tensor) -> Any:
        return self.then(self.layer(x))


def fails(x: Tensor) -> Tensor:
    raise ValueError("of the user's")


def has_no_memory(x: Tensor) -> Tensor:
    raise MemoryError


def catches(x: Tensor) -> Tensor:
    """Catches what stops it, and goes on."""
    try:
        return x * 2
    except Stopped:
        return x


def raises_another(x: Tensor) -> Tensor:
    """Raises an error of its own as it is stopped."""
    try:
        return x * 2
    except Stopped:
        raise ValueError("of the user's") from None


class StopsAtMul(Careful):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mul" in str(func):
            self.stop("no products")
        return super().__torch_dispatch__(func, types, args, kwargs)


WAYS: dict[str, Callable[[Rerun], Ran[Any]]] = {
    "forward": lambda rerun: rerun.forward(grad=False),
    "forward with gradients": lambda rerun: rerun.forward(grad=True),
    "backward": lambda rerun: rerun.backward([{0: X}]),
}

NOTES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Careful], str, bool]] = {
    "an error": (fails, Careful, "run again, it raised ValueError: of the user's", False),
    "no memory": (has_no_memory, Careful, "out of memory as it was run again", False),
    "time": (torch.exp, lambda: Careful(limit=Limit(0.0)), "it takes too long", True),
    "a stop that is caught": (catches, StopsAtMul, "no products", True),
    "an error upon a stop": (raises_another, StopsAtMul, "no products", True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", NOTES)
def test_what_ends_a_rerun_is_a_note(case: str, way: str) -> None:
    call, mode, note, was_stopped = NOTES[case]
    ran = WAYS[way](Rerun(Forward(Model(call), (X,), {}, "output"), mode()))
    assert (ran.values, ran.note, ran.was_stopped) == (None, note, was_stopped)
    assert gc.isenabled()
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("way", WAYS)
def test_a_rerun_that_comes_to_its_end_has_no_note(way: str) -> None:
    model = Model(torch.exp)
    ran = WAYS[way](Rerun(Forward(model, (X,), {}, "output"), Careful()))
    assert ran.values is not None
    assert (len(ran.values), ran.note, ran.was_stopped) == (2 if way == "backward" else 1, "", False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_that_does_not_come_to_where_it_was_bad() -> None:
    model = Model(torch.exp)
    ran = Rerun(Forward(model, (X,), {}, "output", model.layer, nth=2), Careful()).forward(grad=False)
    assert (ran.values, ran.note, ran.was_stopped) == (None, "run again, it did not come to where it was bad", True)


def test_the_watch_sees_the_modules_of_a_backward_and_the_root_last() -> None:
    model, seen = Model(torch.exp), []
    Rerun(Forward(model, (X,), {}, "output"), Careful(), lambda key, call: seen.append((key, len(call)))).backward([{0: X}])
    assert seen == [(model.layer, 3), (model.then, 3), (model, 3)]
    assert not any(one._forward_hooks for one in model.modules())


def test_an_error_is_logged_for_whoever_looks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rankwatch.rerun.engine"):
        Rerun(Forward(Model(fails), (X,), {}, "output"), Careful(), describe=lambda error: "told").forward(grad=False)
    assert "Model was not run again to its end: ValueError" in caplog.text
