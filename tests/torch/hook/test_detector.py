"""Batches, frames, trips and aborts, as the detector's hooks make them."""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import weakref
import zipfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn.modules.module import _global_module_registration_hooks, register_module_module_registration_hook

import rankwatch
from models import Calls
from notebook import Fragile, Gain, first_weight, model_of, ones, sgd, watched, watching
from rankwatch.errors import TrainingAborted
from rankwatch.judge.reporter import BadReading
from rankwatch.shared.types.frame import Kind, Position, State
from trainings.parts import Root

# --- batches --------------------------------------------------------------------------------------------------------------


def test_count_all_counts_as_the_hugging_face_detector_does() -> None:
    model = model_of().eval()
    _, notebook = watched(model, count_all=True)
    with torch.no_grad():
        model(ones())
        model(ones())
    assert [summary.batch for _, summary in notebook.batches] == [0, 1]


def test_frames_come_children_first_with_every_ingredient() -> None:
    model, _, notebook = watching(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = ones()
    model(x)
    linear, norm, root = notebook.frames()
    assert [(f.spec.module, f.spec.module_class) for f in (linear, norm, root)] == [
        ("0", "Linear"), ("1", "BatchNorm1d"), ("", "Sequential"),
    ]  # fmt: skip
    assert [r.label for r in linear.readings] == ["weight", "bias", "input[0]", "output"]
    assert [(r.label, r.kind) for r in norm.readings[2:4]] == [("running_mean", Kind.BUFFER), ("running_var", Kind.BUFFER)]
    weight = first_weight(model).abs()
    assert (linear.readings[0].abs_min, linear.readings[0].abs_max) == (weight.min().item(), weight.max().item())
    assert root.readings[0].abs_max == 1.0


def test_optimizer_steps_are_counted_without_help() -> None:
    model, _, notebook = watching()
    ours = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[2].parameters(), 0.1)]
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    for _ in range(3):
        for _ in range(2):
            model(ones()).sum().backward()
        for optimizer in (*ours, other, other):
            optimizer.step()
    assert [summary.optimizer_step for _, summary in notebook.batches] == [0, 0, 1, 1, 2, 2]


def test_phases() -> None:
    phases = []
    model, detector, _ = watching()
    model[0].register_forward_hook(lambda *_: phases.append(detector.phase))
    loss = model(ones()).sum()
    loss.register_hook(lambda _: phases.append(detector.phase))
    loss.backward()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: phases.append(detector.phase))
    optimizer.step()
    assert [*phases, detector.phase] == ["forward", "backward", "optimizer", "idle"]


def test_a_child_whose_exception_the_user_catches() -> None:
    def careful(self: Root, x: Tensor) -> Any:
        with suppress(ValueError):
            x = self.bad(x)
        return self.good(x)

    model = Root(careful, bad=Fragile(-1.0), good=Gain())
    _, notebook = watched(model)
    model(ones())
    assert [f.spec.module for f in notebook.frames()] == ["good", ""]


def test_a_root_that_returns_nothing_is_no_exception() -> None:
    model = Root(lambda self, x: print(self.inner(x)), inner=Gain())
    _, notebook = watched(model)
    try:
        raise KeyError
    except KeyError:  # a forward inside an except block
        model(ones())
    assert notebook.frames()[-1].readings[-1].state is State.NONE


# --- what is measured once ------------------------------------------------------------------------------------------------


def test_a_change_in_place_is_measured_again() -> None:
    model, _, notebook = watching(Gain(), nn.ReLU(inplace=True), Gain())
    model(-ones())
    readings = [[(r.label, r.abs_max) for r in frame.readings] for frame in notebook.frames()]
    assert readings[0] == [("input[0]", 1.0), ("output", 1.0)]
    assert readings[1] == [("input[0]", 0.0), ("output", 0.0)]
    assert readings[2] == [("input[0]", 0.0), ("output", 0.0)]


# --- trips ----------------------------------------------------------------------------------------------------------------


def test_the_guilty_frame_raises_at_once_with_the_evidence() -> None:
    ran = []
    model, _, notebook = watching(nn.Linear(4, 4), Gain(1e39), nn.Linear(4, 2), max_frames_to_save=2)
    model[2].register_forward_pre_hook(lambda *_: ran.append("2"))
    trip = notebook.trip_of(model, ones())
    assert ran == []
    assert (trip.position, trip.culprit.label, trip.culprit.state) == (Position(0, 0, 1), "output", State.INF)
    assert (trip.shape, trip.numel, trip.nan_count, trip.inf_count) == ((3, 4), 12, 0, 12)
    assert [frame.spec.module for frame in trip.frames] == ["0", "1"]
    assert [reading.label for reading in trip.root_inputs] == ["input[0]"]


def test_a_bad_weight_is_named_before_the_output_it_spoils() -> None:
    model = model_of()
    with torch.no_grad():
        first_weight(model)[0, 0] = math.nan
    _, notebook = watched(model)
    assert notebook.trip_of(model, ones()).culprit.label == "weight"
    assert notebook.bad_readings == [[BadReading("weight", 1, 0), BadReading("output", 3, 0)]]


def test_an_inf_mask_trips_only_under_strict() -> None:
    mask = torch.tensor([0.0, 0.0, 0.0, -math.inf])
    model = Calls(lambda x, mask: torch.softmax(x + mask, -1))
    detector, notebook = watched(model)
    model(ones(), mask=mask)
    model(ones(), mask)
    detector.remove()
    _, notebook = watched(model, policy="strict")
    model(ones(), mask=mask)
    assert notebook.trip_of(model, ones(), mask).culprit.label == "input[1]"


@pytest.mark.parametrize("options", [{"policy": "off"}, {"ignore": ["1"]}, {"ignore": ["1:output"]}])
def test_a_bad_frame_that_may_not_trip_is_reported(options: dict[str, Any]) -> None:
    model = model_of(nn.Linear(4, 4), Gain(math.inf))
    options = {**options, "ignore": [*options.get("ignore", ()), ""]}
    _, notebook = watched(model, **options)
    model(ones())
    assert notebook.frames()[1].readings[-1].state is State.INF


def test_a_trip_of_a_traced_batch_is_reported_when_the_user_raises_first() -> None:
    def check(x: Tensor) -> Tensor:
        assert x.isfinite().all(), "the user's own check"
        return x

    model, _, notebook = watching(Gain(math.inf), Calls(check), trace_batch_nums=[0])
    with pytest.raises(AssertionError, match="the user's own check"):
        model(ones())
    assert [position for position, _ in notebook.found] == [Position(0, 0, 0)]


# --- being stopped, and stopping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "eval", "optimizer"])
def test_an_abort_is_raised_at_the_next_hook(where: str, recwarn: pytest.WarningsRecorder) -> None:
    model, detector, _ = watching()
    optimizer = sgd(model)
    model(ones()).sum().backward()
    before = copy.deepcopy(model.state_dict())
    detector.obey(lambda: TrainingAborted("rank 5 of 8"))
    if where == "eval":
        model.eval()
    with pytest.raises(TrainingAborted, match="rank 5 of 8"):
        _ = optimizer.step() if where == "optimizer" else model(ones())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert list(recwarn) == []


def test_an_abort_in_mid_forward(recwarn: pytest.WarningsRecorder) -> None:
    model, detector, _ = watching(Gain(), Gain(), Gain())
    model[1].register_forward_pre_hook(lambda *_: detector.obey(lambda: TrainingAborted("now")))
    with pytest.raises(TrainingAborted, match="now"):
        model(ones())
    assert detector.position == Position(0, 0, 1)
    assert list(recwarn) == []


def test_an_error_of_ours_is_logged_once_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, detector, notebook = watching()
    monkeypatch.setattr(detector._recorder, "call", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            model(ones()).sum().backward()
    fault = "switched itself off in batch 0 by an error of its own: ZeroDivisionError('division by zero')"
    assert [record.getMessage() for record in caplog.records] == [f"rankwatch: {fault}"]
    assert notebook.faults == [fault]
    assert notebook.batches == []
    detector.obey(lambda: TrainingAborted("still heard"))
    with pytest.raises(TrainingAborted, match="still heard"):
        model(ones())


def compiled_in_place(model: nn.Module) -> nn.Module:
    wrapper = nn.DataParallel(model)
    wrapper.compile(backend="eager")
    return wrapper


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, compiled_in_place])
def test_a_watch_keeps_no_wrapper_alive(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A training may wrap its model anew, and the reducer of the DDP before would go on."""
    model = model_of()
    wrapper = wrap(model)
    watched(wrapper, gradients=True, fingerprints=1)
    before = weakref.ref(wrapper)
    optimizer = sgd(model)
    model(ones()).sum().backward()
    optimizer.step()
    del wrapper
    gc.collect()
    assert before() is None


@pytest.mark.parametrize("wrap", [lambda model: model, symbolic_trace, torch.compile], ids=["plain", "fx", "compiled"])
def test_a_saved_or_copied_model_is_as_without_a_watch(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    net[1].register_forward_hook(print, with_kwargs=True, always_call=True)
    model = wrap(net)

    def saved(module: nn.Module) -> bytes:
        file = io.BytesIO()
        torch.save(module, file)
        return zipfile.ZipFile(file).read("archive/data.pkl")

    def made() -> list[Any]:
        copies = copy.deepcopy(model), copy.copy(model)
        return [*map(saved, (model, *copies, *model.children())), [one._forward_hooks for one in copies[0].modules()]]

    bare = made()
    watched(model, fingerprints=1, gradients=True)
    assert made() == bare


def test_a_watched_model_that_goes_while_torch_walks_through_its_hooks_disturbs_nobody() -> None:
    def leave_one_behind() -> weakref.ref[nn.Module]:
        model = model_of()
        rankwatch.watch(model)
        model(ones())
        return weakref.ref(model)

    left: list[weakref.ref[nn.Module]] = []
    gone: list[bool] = []

    def collect(*args: Any) -> None:
        if left:
            gc.collect()
            gone.append(left[0]() is None)

    handle = register_module_module_registration_hook(collect)  # torch calls it before ours
    gc.disable()
    try:
        left.append(leave_one_behind())
        nn.Sequential(nn.Linear(1, 1))
    finally:
        gc.enable()
        handle.remove()
    assert gone == [True]
    before = len(_global_module_registration_hooks)
    watched(model_of())[0].remove()
    assert len(_global_module_registration_hooks) == before - 1  # the hook of the deleted model


@pytest.mark.parametrize("how", ["before", "after", "in place", "a part"])
def test_a_compiled_model_is_watched(how: str) -> None:
    model = model_of(nn.Linear(4, 4), Gain(), nn.Linear(4, 2))
    compiled: Any = model
    if how == "before":
        _, notebook = watched(model)
    if how == "in place":
        model.compile(backend="eager")
    elif how == "a part":
        model[0] = torch.compile(model[0], backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    if how != "before":
        _, notebook = watched(compiled)
    compiled(ones())
    compiled(ones())
    assert [[f.spec.module for f in notebook.frames(batch)] for batch in range(2)] == [["0", "1", "2", ""]] * 2
    assert notebook.trip_of(compiled, ones() * math.nan).frame.spec.module == "0"


def test_a_trip_counts_even_when_its_counts_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    model, _, notebook = watching(Gain(math.inf))
    monkeypatch.setattr("rankwatch.judge.trip_finder.count_non_finite", out_of_memory)
    trip = notebook.trip_of(model, ones())
    assert (trip.shape, trip.inf_count) == ((3, 4), 0)
