"""Watching the backward: which gradients belong to which batch, when they trip, and that the training is unchanged."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from models import Calls, Checkpointed
from notebook import (
    Gain,
    Notebook,
    ScaledTraining,
    first_weight,
    learn,
    model_of,
    ones,
    sgd,
    take_step,
    watched,
    watching,
)
from rankwatch.errors import OverflowDetected
from rankwatch.shared.types.frame import Frame, Kind, Phase, State
from rankwatch.shared.types.notice import ZEROS
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.cause import classify
from trainings.parts import Root, Through, multiplied

every_check = pytest.mark.parametrize("check", ["frame", "batch", "async"])
both_checkpoints = pytest.mark.parametrize("use_reentrant", [True, False])


def frames_of(notebook: Notebook, batch: int, phase: Phase = Phase.BACKWARD) -> list[Frame]:
    frames = [frame for table, summary in notebook.batches if summary.batch == batch for frame in summary.frames(table)]
    return [frame for frame in frames if frame.spec.phase is phase]


def gradients_of(notebook: Notebook, batch: int) -> dict[str, float]:
    """The abs max of each gradient, as ``module:label``; test_health tests the share of zeros."""
    return {
        f"{frame.spec.module}:{reading.label}": reading.abs_max
        for frame in frames_of(notebook, batch)
        for reading in frame.readings
        if not reading.label.endswith(ZEROS)
    }


# --- what is reported -----------------------------------------------------------------------------------------------------


@every_check
def test_every_gradient_is_reported_in_the_batch_of_its_forward(check: str) -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Gain(3.0), nn.Linear(4, 2), check=check, gradients=True)
    optimizer = sgd(model)
    expected = []
    for batch in range(3):
        (model(ones()).sum() * 10**batch).backward()
        expected.append(
            {name: float(value.grad.abs().max()) for name, value in model.named_parameters() if value.grad is not None}
        )
        take_step(optimizer)
    detector.remove()
    for batch in range(3):
        found = gradients_of(notebook, batch)
        assert found.keys() == {
            ":grad_output", "2:grad_output", "2:grad_input[0]", "1:grad_output", "1:grad_input[0]", "0:grad_output",
            "2:weight.grad", "2:bias.grad", "0:weight.grad", "0:bias.grad",
        }  # fmt: skip
        assert {name: found[f"{name.replace('.', ':')}.grad"] for name in expected[batch]} == expected[batch]
        assert found[":grad_output"] == found["2:grad_output"] == 10**batch
        assert found["0:grad_output"] == found["1:grad_input[0]"] == pytest.approx(3 * found["1:grad_output"])


def test_gradients_have_their_kinds_and_follow_the_forwards_frames() -> None:
    model, detector, notebook = watching(gradients=True)
    model(ones()).sum().backward()
    detector.remove()
    assert [(summary.batch, summary.first_frame) for _, summary in notebook.batches] == [(0, 0), (0, 5)]
    kinds = {reading.label: reading.kind for frame in notebook.frames() for reading in frame.readings}
    assert kinds == {
        "grad_output": Kind.GRAD_OUTPUT,
        "grad_input[0]": Kind.GRAD_INPUT,
        "weight.grad": Kind.GRADIENT,
        "weight.grad zeros": Kind.GRADIENT,
        "bias.grad": Kind.GRADIENT,
        "bias.grad zeros": Kind.GRADIENT,
    }
    assert [frame.position.frame for frame in notebook.frames()] == list(range(5, 5 + len(notebook.frames())))


def test_a_module_that_is_called_twice_has_a_frame_for_each_call() -> None:
    model = Root(lambda self, x: self.gain(self.gain(self.linear(x))), gain=Gain(2.0), linear=nn.Linear(4, 4))
    detector, notebook = watched(model, gradients=True)
    model(ones()).sum().backward()
    detector.remove()
    calls = [frame for frame in frames_of(notebook, 0) if frame.spec.module == "gain"]
    assert [[reading.abs_max for reading in frame.readings] for frame in calls] == [[1.0, 2.0], [2.0, 4.0]]


@both_checkpoints
def test_under_checkpointing_gradients_belong_to_the_batch_of_their_forward(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    optimizer = sgd(model, 0.0)
    detector, notebook = watched(model, gradients=True)
    for batch in range(3):
        learn(model(ones()).sum() * 10**batch, optimizer)
    detector.remove()
    for batch in range(3):
        assert [frame.spec.module for frame in frames_of(notebook, batch, Phase.RECOMPUTE)][:2] == ["block.0", "block.1"]
        found = gradients_of(notebook, batch)
        assert found[":grad_output"] == found["block.2:grad_output"] == 10**batch
        assert found["block.2:bias.grad"] == 3 * 10**batch  # three samples
        assert {"block.0:weight.grad", "block.0:grad_output", "first:weight.grad", "first:grad_output"} <= found.keys()


@both_checkpoints
def test_recomputed_gradients_belong_to_the_batch_whose_backward_runs(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    detector, notebook = watched(model)
    losses = [model(ones() * 10**batch).sum() for batch in range(2)]
    for loss in losses:
        loss.backward()
    detector.remove()
    forward, again = [
        [frames_of(notebook, batch, phase)[index].abs_max for batch in range(2)]
        for phase, index in ((Phase.FORWARD, 1), (Phase.RECOMPUTE, 0))
    ]
    assert again == forward


@both_checkpoints
def test_under_gradient_accumulation_each_micro_batch_has_its_own(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    optimizer = sgd(model, 0.0)
    detector, notebook = watched(model, gradients=True)
    for batch in range(4):
        model(ones()).sum().backward()
        if batch % 2:
            take_step(optimizer)
    detector.remove()
    found = [gradients_of(notebook, batch) for batch in range(4)]
    assert [gradients[":grad_output"] for gradients in found] == [1.0] * 4
    assert [gradients["block.2:bias.grad"] for gradients in found] == [3.0, 6.0, 3.0, 6.0]  # as accumulated so far
    steps = {summary.batch: summary.optimizer_step for _, summary in notebook.batches}
    assert steps == {0: 0, 1: 0, 2: 1, 3: 1}


@every_check
def test_one_backward_through_two_forwards_reports_the_gradients_of_both(check: str) -> None:
    model, detector, notebook = watching(check=check, gradients=True)
    (model(ones()).sum() + 2 * model(ones()).sum()).backward()
    detector.remove()
    assert [gradients_of(notebook, batch).get(":grad_output") for batch in range(2)] == [1.0, 2.0]


@every_check
@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_gradient_of_either_of_two_forwards_trips(check: str, bad: int) -> None:
    model, _, notebook = watching(nn.Linear(4, 4), gain := Through(), nn.Linear(4, 2), check=check, gradients=True)
    loss = torch.zeros(())
    for batch in range(2):
        gain.gain = math.inf if batch == bad else 1.0
        loss = loss + model(ones()).sum()
    trip = notebook.trip_by_the_end(loss.backward)
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (bad, "1", "grad_input[0]")


# --- what trips -----------------------------------------------------------------------------------------------------------


@every_check
@pytest.mark.parametrize(("factor", "state"), [(math.inf, State.INF), (math.nan, State.NAN)])
def test_a_bad_gradient_is_named_at_its_origin_before_a_weight_changes(check: str, factor: float, state: State) -> None:
    model = model_of(nn.Linear(4, 4), Through(factor), nn.Linear(4, 2))
    optimizer = sgd(model)
    before = [parameter.clone() for parameter in model.parameters()]
    _, notebook = watched(model, check=check, gradients=True)
    trip = notebook.trip_of(learn, model(ones()).sum(), optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert (trip.position.batch, trip.frame.spec.phase, trip.loss_scale) == (0, Phase.BACKWARD, 0.0)
    assert (trip.frame.spec.module, trip.culprit.label, trip.culprit.state) == ("1", "grad_input[0]", state)
    cause, evidence = classify(trip)
    assert cause is Cause.GRADIENT
    assert "born in this module's backward, unless its input is used elsewhere, too: the gradient that came" in evidence


@every_check
def test_a_bad_gradient_of_the_loss_is_named_as_the_roots(check: str) -> None:
    model, _, notebook = watching(check=check, gradients=True)
    trip = notebook.trip_by_the_end(multiplied(model(ones()), math.inf).sum().backward)
    assert (trip.frame.spec.module, trip.culprit.label) == ("", "grad_output")
    cause, evidence = classify(trip)
    assert cause is Cause.GRADIENT
    assert evidence.startswith("in PoisonedBackward, the gradient of the autograd.Function Poisoned is inf")
    assert "the gradient of the loss with respect to the model's output was inf" in evidence


@both_checkpoints
def test_a_gradient_born_in_a_checkpoint_is_named_there(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    model.block[1] = Through()
    _, notebook = watched(model, gradients=True)
    model(ones()).sum().backward()
    model.block[1] = Through(math.inf)
    trip = notebook.trip_of(model(ones()).sum().backward)
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (1, "block.1", "grad_input[0]")
    assert classify(trip)[0] is Cause.GRADIENT


def test_gradients_are_not_watched_unless_asked_for() -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), Through(math.inf))
    model(ones()).sum().backward()
    detector.remove()
    assert [frames_of(notebook, 0), notebook.trips] == [[], []]


def test_after_the_watch_is_closed_no_gradient_is_reported() -> None:
    model, detector, notebook = watching(gradients=True)
    loss = model(ones()).sum()
    detector.remove()
    loss.backward()
    assert frames_of(notebook, 0) == []
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


# --- what has no gradient -------------------------------------------------------------------------------------------------


def test_frozen_parameters_have_none() -> None:
    model = model_of(nn.Linear(4, 4), Gain(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    detector, notebook = watched(model, gradients=True)
    model(ones()).sum().backward()
    detector.remove()
    assert gradients_of(notebook, 0).keys() == {":grad_output", "2:grad_output", "2:weight.grad", "2:bias.grad"}


def test_a_parameter_that_thaws_is_reported_from_then_on() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    detector, notebook = watched(model, gradients=True)
    model(ones()).sum().backward()
    model[0].requires_grad_(True)
    model(ones()).sum().backward()
    detector.remove()
    assert ["0:weight.grad" in gradients_of(notebook, batch) for batch in range(2)] == [False, True]


@pytest.mark.parametrize("split", [lambda x: (x * 1, x * 2), lambda x: x.chunk(2, -1)])
def test_an_output_that_is_not_used_holds_nothing_up(split: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    model = Root(lambda self, x: self.splits(self.linear(x))[0] * 5, linear=nn.Linear(4, 4), splits=Calls(split))
    detector, notebook = watched(model, gradients=True)
    for _ in range(2):
        model(ones()).sum().backward()
    detector.remove()
    assert detector.fault == ""
    for batch in range(2):
        found = gradients_of(notebook, batch)
        assert {found[name] for name in ("splits:grad_output[0]", "splits:grad_input[0]", "linear:grad_output")} == {5.0}


def test_a_forward_without_gradients_has_no_backward() -> None:
    model, detector, notebook = watching(gradients=True)
    model(ones()).sum().backward()
    with torch.no_grad():
        model(ones())
    model(ones())  # never propagated back
    model(ones()).sum().backward()
    detector.remove()
    assert [len(frames_of(notebook, batch)) for batch in range(3)] == [8, 0, 8]


def test_a_part_that_is_detached_has_none() -> None:
    model = Root(lambda self, x: self.student(self.teacher(x).detach()), teacher=nn.Linear(4, 4), student=nn.Linear(4, 4))
    detector, notebook = watched(model, gradients=True)
    model(ones()).sum().backward()
    detector.remove()
    assert {frame.spec.module for frame in frames_of(notebook, 0)} == {"student", ""}


class Token:
    """The graph behind a tensor holds this object: both are freed together."""

    def __call__(self, gradient: Tensor) -> None: ...

    @classmethod
    def on(cls, output: Tensor) -> ref[Token]:
        token = cls()
        output.register_hook(token)
        return ref(token)


@pytest.mark.parametrize("back", [True, False])
def test_a_graph_is_freed_after_its_backward_or_without_one(back: bool) -> None:
    model, *_ = watching(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), gradients=True)
    activations = []
    model[1].register_forward_hook(lambda module, args, output: activations.append(ref(output.untyped_storage())))
    graphs = []
    for _ in range(5):
        output = model(ones())
        graphs.append(Token.on(output))
        if back:
            output.sum().backward()
    del output
    gc.collect()
    assert [activation() for activation in activations] == [None] * 5
    assert [graph() for graph in graphs] == [None] * 5


# --- the training stays what it was ---------------------------------------------------------------------------------------


def with_dropout() -> Any:
    return model_of(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 2))


def in_place() -> Any:
    return model_of(nn.Linear(4, 16), nn.ReLU(inplace=True), nn.Linear(16, 2), nn.ELU(inplace=True))


def tied() -> Any:
    model = model_of(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Flatten())


def recurrent() -> nn.Module:
    def last(self: Root, x: Tensor) -> Tensor:
        states, _ = self.lstm(x.unsqueeze(1).expand(-1, 5, -1))
        out: Tensor = self.head(states[:, -1])
        out += 1  # in place, on what a module returned
        return out

    return Root(last, lstm=nn.LSTM(4, 8, batch_first=True), head=nn.Linear(8, 2))


@every_check
@pytest.mark.parametrize(
    "build",
    [
        *(with_dropout, in_place, tied, convolution, recurrent),
        pytest.param(partial(Checkpointed, False), id="checkpointed"),
        pytest.param(partial(Checkpointed, True), id="checkpointed the old way"),
    ],
)
def test_a_watched_training_is_the_same_bit_for_bit(build: Callable[[], nn.Module], check: str) -> None:
    def train(model: nn.Module) -> list[float]:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        losses = []
        for _ in range(5):
            loss = model(torch.randn(6, 4)).square().mean()
            learn(loss, optimizer)
            losses.append(loss.item())
        return losses

    def built() -> nn.Module:
        torch.manual_seed(0)
        return build()

    bare, model = built(), built()
    expected = train(bare)
    detector, notebook = watched(model, check=check, gradients=True)
    assert train(model) == expected
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in bare.state_dict().items())
    assert detector.fault == ""
    detector.remove()
    assert {summary.batch for _, summary in notebook.batches} == set(range(5))
    assert all(frames_of(notebook, batch) for batch in range(5))


# --- dynamic loss scaling -------------------------------------------------------------------------------------------------


@every_check
def test_an_inf_gradient_that_the_scaler_handles_is_reported_and_does_not_trip(check: str) -> None:
    training = ScaledTraining(gradients=True, init_scale=2.0**127, check=check)
    for _ in range(5):
        training.batch(bad=False)
    training.detector.remove()
    shrank = [later < sooner for sooner, later in pairwise(training.scales)]
    assert set(shrank) == {True, False}
    states = [{r.state for f in frames_of(training.notebook, batch) for r in f.readings} for batch in range(4)]
    assert [State.INF in found for found in states] == shrank
    assert training.notebook.trips == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_precision_training_finds_its_scale(dtype: torch.dtype) -> None:
    model = model_of(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=float(torch.finfo(dtype).max))
    detector, notebook = watched(model, gradients=True)
    for _ in range(12):
        with torch.autocast("cpu", dtype):
            loss = (10 - model(ones()).float()).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    detector.remove()
    assert notebook.trips == []
    calls = [frame.readings for frame in frames_of(notebook, 0) if frame.spec.module == "1"]
    assert [(reading.label, reading.dtype) for reading in calls[0]] == [
        ("grad_output", str(dtype).removeprefix("torch.")),
        ("grad_input[0]", str(dtype).removeprefix("torch.")),
    ]
    finite = [all(r.state is State.FINITE for f in frames_of(notebook, batch) for r in f.readings) for batch in range(12)]
    assert (finite[0], finite[-1]) == (False, True)


def test_it_trips_once_the_scale_has_shrunk_too_often_in_a_row() -> None:
    training = ScaledTraining(gradients=True, max_scale_shrinks=3)
    for _ in range(3):
        training.batch(bad=True)
    assert training.scaler.get_scale() == 1024.0 / 8
    with pytest.raises(OverflowDetected):
        training.batch(bad=True)
    trip = training.notebook.trip
    assert (trip.position.batch, trip.frame.spec.module, trip.loss_scale) == (3, "", 1024.0 / 8)
    assert "; the loss scale was 128" in classify(trip)[1]
    assert trip.bad_since == 0


@every_check
def test_the_loss_scale_of_a_trip_is_the_one_of_its_batch(check: str) -> None:
    training = ScaledTraining(gradients=True, max_scale_shrinks=3, check=check)
    training.batch(bad=False)
    with suppress(OverflowDetected):
        for _ in range(10):
            training.batch(bad=True)
    trip = training.notebook.trip
    assert trip.position.batch == 4
    assert trip.loss_scale == training.scales[4]


def test_a_step_that_is_taken_resets_the_count() -> None:
    training = ScaledTraining(gradients=True, max_scale_shrinks=3)
    for bad in [False] + [True, True, False] * 4 + [True] * 3:
        training.batch(bad=bad)
    assert training.notebook.trips == []
    with pytest.raises(OverflowDetected):
        training.batch(bad=True)


def test_a_scaler_that_is_not_enabled_absorbs_nothing() -> None:
    model, *_ = watching(gradients=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(OverflowDetected):
        scaler.scale(model(ones()).sum() * math.inf).backward()


def test_the_loss_scale_of_an_engine_is_asked_for() -> None:
    """The engine has an internal scaler, as in DeepSpeed."""
    model, scale = model_of(), [256.0]
    _, notebook = watched(model, gradients=True, loss_scale=lambda: scale[0], max_scale_shrinks=2)
    for _ in range(2):
        (model(ones()).sum() * math.inf).backward()
        scale[0] /= 2
    assert notebook.trips == []
    trip = notebook.trip_of((model(ones()).sum() * math.inf).backward)
    assert (trip.position.batch, trip.loss_scale) == (2, 64.0)


def test_the_scale_of_an_engine_that_grows_again_resets_the_count() -> None:
    model, scale = model_of(), [256.0]
    detector, notebook = watched(model, gradients=True, loss_scale=lambda: scale[0], max_scale_shrinks=2)
    for factor in [0.5, 2.0] * 4 + [0.5]:
        (model(ones()).sum() * (math.inf if factor < 1 else 1.0)).backward()
        scale[0] *= factor
    detector.remove()
    assert notebook.trips == []


def test_an_engine_whose_scale_cannot_be_read_does_not_stop_the_training(caplog: pytest.LogCaptureFixture) -> None:
    model, detector, _ = watching(gradients=True, loss_scale=lambda: [][1])
    with caplog.at_level("CRITICAL"):
        model(ones()).sum().backward()
    assert "IndexError" in detector.fault


def test_gradients_that_no_hook_saw_are_measured_before_the_step() -> None:
    model, detector, notebook = watching(gradients=True)
    optimizer = sgd(model)
    before = first_weight(model).clone()
    model(ones())
    for parameter in model.parameters():  # FSDP sets the gradients of its shards in this way
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert gradients_of(notebook, 0) == {"0:weight.grad": 1, "0:bias.grad": 1, "2:weight.grad": 1, "2:bias.grad": 1}
    after = first_weight(model).clone()
    assert not torch.equal(before, after)
    model(ones())
    for parameter in model[2].parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    trip = notebook.trip_of(optimizer.step)
    assert (trip.frame.spec.module, trip.culprit.label, classify(trip)[0]) == ("2", "weight.grad", Cause.GRADIENT)
    assert torch.equal(first_weight(model), after)
    assert detector.fault == ""


def test_a_backward_that_raised_leaves_nothing_behind() -> None:
    last = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), last)
    detector, notebook = watched(model, gradients=True)
    optimizer = sgd(model)
    for batch in range(6):
        output = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(batch)))
        if batch == 2:
            # The backward ends between the gradients of the last layer's output and input.
            handle = last.weight.register_hook(_interrupt)
            with pytest.raises(RuntimeError, match="the user's own"):
                output.square().mean().backward()
            handle.remove()
            model.zero_grad()
            continue
        learn(output.square().mean(), optimizer)
    detector.remove()
    assert detector.fault == ""
    assert detector._gradients._calls._begun == {}
    counts = [len(frames_of(notebook, batch)) for batch in (0, 1, 3, 4, 5)]
    assert counts == [counts[0]] * 5


def _interrupt(gradient: Tensor) -> None:
    raise RuntimeError("the user's own")


def test_gradients_of_one_structure_and_other_needs_have_their_own_rows() -> None:
    """Of calls with the same dtypes, one input wants a gradient here, another one there."""

    def both(self: Root, x: Tensor) -> Any:
        hidden = self.linear(x)
        return self.left(hidden, x) + self.right(x, hidden)

    model = Root(both, linear=nn.Linear(4, 4), left=Calls(torch.mul), right=Calls(torch.mul))
    detector, notebook = watched(model, gradients=True)
    model(torch.randn(3, 4)).sum().backward()
    detector.remove()
    frames = [frame for table, summary in notebook.sent for frame in summary.frames(table)]
    backward = {
        frame.spec.module: frame.spec for frame in frames if frame.spec.phase is Phase.BACKWARD and frame.spec.module
    }
    assert [row.label for row in backward["left"].readings] == ["grad_output", "grad_input[0]"]
    assert [row.label for row in backward["right"].readings] == ["grad_output", "grad_input[1]"]
