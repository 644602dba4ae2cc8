"""The close-up of a bad gradient: in which precision the backward of the batch is finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from closeups import the_only
from models import Calls
from notebook import learn, sgd, watched
from rankwatch.rerun import close_up_runs as closeup
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.frame import State
from rankwatch.shared.words.cause import classify
from rankwatch.shared.words.closeup_text import describe_precision


def hidden(x: Tensor) -> Tensor:
    y = x.abs() - x.abs()
    return torch.where(y > 0, y.sqrt(), torch.zeros_like(y)) + x


def closeup_of(model: nn.Module, x: Tensor, gain: float = 1.0) -> CloseUp:
    _, notes = watched(model)
    return the_only(notes, learn, model(x).float().sum() * gain, sgd(model, 0.0))[1]


def narrow(*modules: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *modules, nn.Linear(4, 4))
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(0.5)
    return model.half()


def test_a_gradient_that_overflows_in_float16_is_finite_in_float32() -> None:
    found = closeup_of(narrow(), torch.full((2, 4), 0.25, dtype=torch.float16), gain=6e4)
    assert [(one.dtype, one.state) for one in found.precision] == [("float32", State.FINITE), ("float64", State.FINITE)]
    assert found.precision[0].abs_max > 65504
    assert describe_precision(found.precision).startswith("finite in float32 and float64: abs max ")
    assert (found.recurred, found.of, found.note) == (3, 3, "")


def test_casts_within_a_model_of_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: (x.half() * 2).float()))
    found = closeup_of(model, torch.ones(2, 4), gain=5e4)
    assert [one.state for one in found.precision] == [State.FINITE, State.FINITE]


def test_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: x.half() * 60000.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = closeup_of(model, torch.ones(2, 4) * 1e-3, gain=4.0)
    assert [one.state for one in found.precision] == [State.FINITE, State.FINITE]


def test_in_a_checkpoint() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: checkpoint(torch.mul, x, 4.0, use_reentrant=False)))
    found = closeup_of(model.half(), torch.full((2, 4), 0.25, dtype=torch.float16), gain=6e4)
    assert [one.state for one in found.precision] == [State.FINITE, State.FINITE]


def test_a_gradient_of_0_times_inf_is_bad_in_every_precision() -> None:
    found = closeup_of(nn.Sequential(nn.Linear(4, 4), Calls(hidden)), torch.ones(2, 4))
    assert [(one.dtype, one.state) for one in found.precision] == [("float32", State.NAN), ("float64", State.NAN)]
    assert describe_precision(found.precision).startswith("bad in every precision")


def test_a_gradient_that_the_loss_made_names_its_operator_and_line() -> None:
    model = nn.Linear(4, 4, bias=False)
    _, notes = watched(model)
    loss = (model(torch.zeros(2, 4)) ** 2).mean().sqrt()
    trip, found = the_only(notes, learn, loss, sgd(model, 0.0))
    assert found.note.startswith("not run again: the gradient that came from the loss was bad")
    assert trip.operator is not None
    assert (trip.operator.node, trip.operator.module) == ("SqrtBackward0", "the loss")
    assert classify(trip)[1].startswith("in SqrtBackward0, the gradient of aten.sqrt of abs max 0 (result) is inf")


def test_the_model_is_as_it_was() -> None:
    model = narrow(nn.BatchNorm1d(4), nn.Dropout())
    kept = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: value.clone() for name, value in kept.items()}
    _, notes = watched(model)
    optimizer = sgd(model, 0.0)
    loss = model(torch.rand(2, 4).half()).float().sum() * 6e4
    mean = model.get_buffer("1.running_mean").clone()
    loss.backward()
    gradients = [value.grad for value in model.parameters()]
    random = torch.get_rng_state()
    _, found = the_only(notes, optimizer.step)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(value.grad is gradient for value, gradient in zip(model.parameters(), gradients, strict=True))
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(now[name] is value for name, value in kept.items())
    assert all(torch.equal(now[name], before[name]) for name in now if not name.startswith("1."))
    assert torch.equal(model.get_buffer("1.running_mean"), mean)
    assert found.of == 3


def test_without_memory_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closeup, "_free_memory", lambda module: 100.0)
    found = closeup_of(narrow(), torch.full((2, 4), 0.25, dtype=torch.float16), gain=6e4)
    assert (found.precision, found.note) == ((), "not run in float32: too little memory is free")
