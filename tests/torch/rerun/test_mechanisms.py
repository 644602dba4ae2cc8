"""Mechanisms that make an inf or nan: cause and evidence, the operator, the user's line, recurrence and precision."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

import mechanisms
from closeups import operator_of, tripped
from mechanisms import TABLES, Mechanism
from models import Calls
from notebook import model_of
from rankwatch.shared.types.frame import State
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.cause import classify


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("cause", "one"), [pytest.param(cause, one, id=name) for cause, rows in TABLES.items() for name, one in rows.items()]
)
def test_cause_operator_line_recurrence_and_precision(cause: Cause, one: Mechanism) -> None:
    before = one.given.clone()
    trip, found = tripped(model_of(nn.Identity(), Calls(one.call)), one.given)
    assert torch.equal(one.given, before)
    told, evidence = classify(trip)
    assert (told, trip.frame.spec.module) == (cause, "1"), evidence
    assert evidence.startswith(f"aten.{one.operator.partition('.')[0]} ")
    assert one.says in evidence
    operator = operator_of(found)
    assert operator.name in (f"aten.{one.operator}", f"aten.{one.operator}.default")
    assert operator.source is not None
    assert (operator.source.file, operator.source.line) == (mechanisms.__file__, one.call.__code__.co_firstlineno + one.line)
    assert operator.source.text == linecache.getline(mechanisms.__file__, operator.source.line).strip()
    assert trip.operator == operator
    assert (trip.recurs, found.recurred, found.of, found.note) == (True, 3, 3, "")
    wide = {each.dtype: each.state for each in found.precision}["float64"]
    assert (wide is State.FINITE) == (cause is Cause.OVERFLOW if one.is_wide is None else one.is_wide)
