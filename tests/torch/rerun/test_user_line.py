"""The line of the user's that called an operator, and where a rerun begins on the stack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeups import line_of
from models import Calls
from rankwatch.rerun import engine
from rankwatch.rerun.engine import Rerun
from rankwatch.rerun.forward import Forward
from rankwatch.rerun.limit import Limit
from rankwatch.rerun.repetition import Repetition
from rankwatch.rerun.user_line import boundary, caller_of


def function_of_ours(name: str) -> Callable[..., Any]:
    """A function in the engine's file that calls what it is given."""

    def call_it(body: Callable[[], Any]) -> Any:
        return body()

    return FunctionType(call_it.__code__.replace(co_name=name, co_filename=str(engine.__file__)), {})


@pytest.mark.parametrize("name", ["_run", "run_again", "anything"])
def test_a_rerun_begins_at_the_function_with_the_mark_whatever_its_name_is(name: str) -> None:
    run = boundary(function_of_ours(name))
    within = run(lambda: caller_of(within_run=True))  # within
    assert within.line == line_of("within", __file__)
    assert run(partial(caller_of, within_run=True)) is None
    outside = run(caller_of)  # outside
    assert outside.line == line_of("outside", __file__)


@pytest.mark.parametrize("name", ["_run", "run_again", "anything"])
def test_no_rerun_begins_at_another_function_of_ours(name: str) -> None:
    call = function_of_ours(name)
    found = call(partial(caller_of, within_run=True))  # no rerun
    assert found.line == line_of("no rerun", __file__)
    assert boundary(function_of_ours(name))(partial(call, partial(caller_of, within_run=True))) is None


def overflow(x: Tensor) -> Tensor:
    return x * x  # too large


@pytest.mark.parametrize(("module", "line"), [(Calls(overflow), "too large"), (nn.Sequential(nn.Linear(1, 1)), "")])
def test_the_line_of_an_operator_in_a_rerun(module: nn.Module, line: str) -> None:
    """Where torch alone calls an operator, the line outside of the rerun is not its line."""
    for parameter in module.parameters():
        nn.init.constant_(parameter, 1e38)
    forward = Forward(module, (torch.full((1, 1), 1e38),), {}, "output", is_live=False)
    ran = Rerun(forward, mode := Repetition(forward, Limit())).forward(grad=False)
    found = mode.origin_of(ran.values or [])
    assert found is not None
    assert found.operator is not None
    source = found.operator.source
    assert (source and source.line) == (line_of(line, __file__) if line else None)
    assert [type(one).__name__ for one in found.modules] == ([] if line else ["Linear"])
