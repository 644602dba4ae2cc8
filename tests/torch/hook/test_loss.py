"""The loss is a reading: whose it is, when it trips, what a loss scaler absorbs, and that the training is unchanged."""

from __future__ import annotations

import gc
import math
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Checkpointed
from notebook import Gain, Notebook, ScaledTraining, learn, model_of, ones, sgd, unwatch, watched, watching
from rankwatch.errors import OverflowDetected
from rankwatch.measure.tape import PendingRead
from rankwatch.shared.types.frame import Frame, Kind, Moment, Phase, State
from rankwatch.shared.types.notice import NoticeKind, describe_notice
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.cause import classify
from rankwatch.shared.words.scalars import LastBatch
from trainings.parts import Root, multiplied

every_check = pytest.mark.parametrize("check", ["frame", "batch", "async"])


def losses(notebook: Notebook) -> list[tuple[int, str, Any]]:
    """Batch, label and value of each loss that was sent."""
    return [
        (frame.position.batch, reading.label, reading.abs_max)
        for index in range(len(notebook.batches))
        for frame in notebook.frames(index)
        for reading in frame.readings
        if reading.kind is Kind.LOSS
    ]


def expect_trip(trip: Trip, batch: int, label: str = "loss", state: State = State.NAN) -> Trip:
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (batch, "", label)
    assert (trip.culprit.kind, trip.culprit.state) == (Kind.LOSS, state)
    return trip


class Training:
    """Two good batches, then the batch of the test."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or model_of()
        self.optimizer = sgd(self.model)
        self.detector, self.notebook = watched(self.model, **options)
        for _ in range(2):
            self.run(lambda: self.model(ones()).square().mean())

    def run(self, loss: Callable[[], Tensor]) -> None:
        learn(loss(), self.optimizer)


# --- whose loss, and where it is sent -------------------------------------------------------------------------------------


@every_check
@pytest.mark.parametrize("every", [1, 2])
def test_the_loss_is_the_last_frame_of_its_batchs_forward_in_one_message(check: str, every: int) -> None:
    model, detector, notebook = watching(check=check, every=every)
    optimizer = sgd(model)
    expected = []
    for batch in range(4):
        loss = model(ones()).square().mean()
        expected.append((batch, "loss", pytest.approx(float(loss))))
        learn(loss, optimizer)
    detector.remove()
    assert losses(notebook) == expected
    firsts = [0, 0, 0, 0] if every == 1 else [0, 3, 0, 3]  # between, the root's frame has the number that it always has
    assert [(summary.batch, summary.first_frame) for _, summary in notebook.sent] == list(enumerate(firsts))
    assert [frame.position.frame for frame in notebook.frames(2)] == [0, 1, 2, 3, 4]
    assert detector.progress == Moment(4, 3, 0, 5)  # the step after it is over


@every_check
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loss_that_passes_through_zero_has_its_sign(check: str, dtype: torch.dtype) -> None:
    model, detector, notebook = watching(check=check)
    optimizer = sgd(model.to(dtype))
    expected = []
    for number in range(4):
        loss = model(ones().to(dtype)).square().mean() * 0 + (1.5 - number)
        expected.append(loss.item())
        learn(loss, optimizer)
    detector.remove()
    assert [summary.loss(table) for table, summary in notebook.sent] == expected == [1.5, 0.5, -0.5, -1.5]
    assert losses(notebook) == [(number, "loss", abs(loss)) for number, loss in enumerate(expected)]


def test_a_loss_that_the_model_returns_has_its_sign_beside_an_output_that_has_none() -> None:
    class Likelihood(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value).square().mean() * 0 - 3

    model = Likelihood(2, 2)
    detector, notebook = watched(model)
    learn(model(torch.ones(1, 2)), sgd(model))
    detector.remove()
    (table, summary) = notebook.sent[0]
    found = {row.label: (row.abs_min, row.abs_max) for frame in summary.frames(table) for row in frame.readings}
    assert (found["output"], found["loss"]) == ((3.0, 3.0), (-3.0, 3.0))


def test_the_forward_is_sent_with_the_loss_before_the_gradients_go_on() -> None:
    sent: list[int] = []
    model, _, notebook = watching()

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda _: sent.append(len(notebook.sent)))

    model[1].register_forward_hook(look)
    loss = model(ones()).sum()
    assert len(notebook.sent) == 0
    loss.backward()
    assert sent == [1]


def test_a_forward_whose_loss_never_comes_is_sent_with_the_next_one() -> None:
    model, detector, notebook = watching()
    for batch in range(3):
        model(ones())
        assert [summary.batch for _, summary in notebook.sent] == list(range(batch))
    detector.remove()
    assert [summary.batch for _, summary in notebook.sent] == [0, 1, 2]
    assert losses(notebook) == []


@every_check
def test_losses_of_one_batch_have_names(check: str) -> None:
    model, detector, notebook = watching(check=check)
    optimizer = sgd(model)
    out = model(ones())
    torch.autograd.backward((out.sum() * 2, out.sum() * 3), retain_graph=True)
    (out.sum() * 4).backward()
    optimizer.step()
    detector.remove()
    total = abs(float(out.sum()))
    assert losses(notebook) == [
        (0, "loss[0]", pytest.approx(2 * total)), (0, "loss[1]", pytest.approx(3 * total)), (0, "loss", pytest.approx(4 * total)),
    ]  # fmt: skip


def test_the_loss_of_another_model_is_not_ours() -> None:
    """A GAN: the discriminator's loss never reaches the generator, but the generator's reaches both."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))
    _, of_generator = watched(generator)
    _, of_discriminator = watched(discriminator)
    steps = [sgd(generator), sgd(discriminator)]
    for _ in range(2):
        fake = generator(ones())
        (discriminator(fake.detach()).mean() * 2).backward()
        discriminator(fake).mean().backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    assert [batch for batch, _, _ in losses(of_generator)] == [0, 1]
    assert [batch for batch, _, _ in losses(of_discriminator)] == [0, 1, 2, 3]
    (discriminator(generator(ones()).detach()).mean() * math.nan).backward()
    expect_trip(of_discriminator.trip_of(steps[1].step), 4)
    assert of_generator.trips == []


def test_given_gradients_and_gradients_that_are_asked_for_are_no_loss() -> None:
    model, _, notebook = watching()
    x = ones().requires_grad_()
    out = model(x)
    out.backward(torch.full_like(out, 2.0))
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.sum() + gradient.square().sum()).backward()  # a gradient penalty
    model(x).sum().backward(torch.tensor(-1.0))
    assert [batch for batch, _, _ in losses(notebook)] == [1, 2]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoints_own_backward_is_no_loss(use_reentrant: bool) -> None:
    training = Training(Checkpointed(use_reentrant))
    assert [batch for batch, _, _ in losses(training.notebook)] == [0, 1]


def test_each_loss_of_an_accumulation_is_of_its_own_batch() -> None:
    model, detector, notebook = watching()
    optimizer = sgd(model)
    for scale in (1.0, 2.0, 3.0):
        (model(ones()).sum() * scale).backward()
    optimizer.step()
    outs = [model(ones() * scale) for scale in (1.0, 2.0)]
    outs[0].sum().backward()
    outs[1].sum().backward()
    detector.remove()
    assert sorted(batch for batch, _, _ in losses(notebook)) == [0, 1, 2, 3, 4]


def test_a_closure_of_an_optimizer_has_a_loss_for_each_of_its_forwards() -> None:
    model, detector, notebook = watching()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(ones()).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    detector.remove()
    found = [batch for batch, _, _ in losses(notebook)]
    assert found == list(range(len(found)))
    assert len(found) >= 3


def test_the_summary_has_the_loss_by_its_name() -> None:
    model, _, notebook = watching()
    model(ones()).square().mean().backward()
    last = LastBatch()
    last.add(*notebook.sent[0])
    assert last.scalars()["abs_max/loss"] == losses(notebook)[0][2]


# --- what trips -----------------------------------------------------------------------------------------------------------


@every_check
@pytest.mark.parametrize("options", [{}, {"every": 5}, {"gradients": True}, {"policy": "strict"}])
def test_a_loss_that_is_nan_trips_before_the_weights_change(check: str, options: dict[str, Any]) -> None:
    training = Training(check=check, **options)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    expect_trip(training.notebook.trip_of(training.run, lambda: training.model(ones()).sum() * math.nan), 2)
    assert all(torch.equal(*pair) for pair in zip(before, training.model.parameters(), strict=True))
    assert losses(training.notebook)[-1][:2] == (2, "loss")


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("check", ["batch", "async"])
def test_numbers_that_come_late_as_from_a_device_are_still_in_one_message(
    monkeypatch: pytest.MonkeyPatch, check: str, gradients: bool
) -> None:
    monkeypatch.setattr(PendingRead, "is_ready", lambda _: False)
    training = Training(check=check, gradients=gradients)
    training.run(lambda: training.model(ones()).square().mean())
    training.detector.remove()
    assert [(batch, label) for batch, label, _ in losses(training.notebook)] == [(0, "loss"), (1, "loss"), (2, "loss")]
    parts = [(summary.batch, summary.first_frame) for _, summary in training.notebook.sent]
    assert parts == [(batch, first) for batch in range(3) for first in ([0, 5] if gradients else [0])]


@pytest.mark.parametrize("gradients", [False, True])
def test_a_loss_whose_number_comes_late_trips_before_the_step(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    monkeypatch.setattr(PendingRead, "is_ready", lambda _: False)
    training = Training(check="batch", gradients=gradients)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    loss = training.model(ones()).sum() * math.nan
    loss.backward()
    assert training.notebook.trips == []
    assert training.detector.progress < Moment(2, 2, 0, 5)
    expect_trip(training.notebook.trip_of(training.optimizer.step), 2)
    assert all(torch.equal(*pair) for pair in zip(before, training.model.parameters(), strict=True))


@every_check
def test_a_loss_without_a_gradient_is_noticed_once_in_a_hundred_batches(check: str) -> None:
    """Cross entropy in which every label is ignored: nan, with gradients of 0."""
    training = Training(check=check)
    labels = torch.full((3,), -100)
    for _ in range(150):
        training.run(lambda: functional.cross_entropy(training.model(ones()), labels))
    training.detector.remove()
    notices = training.notebook.notices
    first, second = [notice for notice in notices if notice.kind is NoticeKind.HARMLESS_LOSS]
    assert (first.batch, first.value, second.batch, second.value) == (2, 1, 102, 101)
    assert {notice.kind for notice in notices} == {NoticeKind.HARMLESS_LOSS, NoticeKind.STOPPED}
    assert "loss: in batch 2 nan, as aten.nll_loss_forward" in describe_notice(first)
    assert len(losses(training.notebook)) == 152
    assert training.notebook.trips == []


@every_check
@pytest.mark.parametrize("options", [{}, {"every": 5}, {"gradients": True}])
def test_a_bad_loss_of_an_accumulation_is_judged_by_the_gradients_of_its_step(check: str, options: dict[str, Any]) -> None:
    training = Training(check=check, **options)
    labels = torch.full((3,), -100)
    functional.cross_entropy(training.model(ones()), labels).backward()
    if not options:
        assert training.detector.progress < Moment(2, 3, 0, 0)
    learn(training.model(ones()).square().mean(), training.optimizer)
    assert training.notebook.trips == []

    def accumulate() -> None:
        ((training.model(ones()) * 0).sum() / 0).backward()
        training.run(lambda: training.model(ones()).square().mean())

    expect_trip(training.notebook.trip_of(accumulate), 4)


def test_what_harms_nothing_still_stops_a_strict_watch() -> None:
    training = Training(policy="strict")
    labels = torch.full((3,), -100)
    expect_trip(training.notebook.trip_of(training.run, lambda: functional.cross_entropy(training.model(ones()), labels)), 2)


@pytest.mark.parametrize(
    ("scale", "cause"), [(0.0, Cause.SINGULAR), (1e4, Cause.OVERFLOW)], ids=["log of 0", "exp of a large number"]
)
def test_an_inf_loss_has_the_cause_that_its_models_output_allows(scale: float, cause: Cause) -> None:
    training = Training(model_of(nn.Linear(4, 4), gain := Gain()))
    gain.gain = scale
    model, loss = training.model, lambda: model(ones()).abs().exp().sum() - (model(ones()).abs() + scale).log().sum()
    assert classify(expect_trip(training.notebook.trip_of(training.run, loss), 3, state=State.INF))[0] is cause


class Hidden:
    """An output that no hook can look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_a_backward_that_no_hook_reports_is_known_by_the_gradients() -> None:
    model, other = Root(lambda self, x: Hidden(self.layer(x)), layer=nn.Linear(4, 4)), nn.Linear(4, 4)
    _, notebook = watched(model)
    model(ones()).tensor.sum().backward()
    (other(ones()).sum() * math.nan).backward()
    model(ones()).tensor.sum().backward()
    assert [batch for batch, _, _ in losses(notebook)] == [0, 1]
    (model(ones()).tensor.sum() * math.nan).backward()
    expect_trip(notebook.trip_of(sgd(model).step), 2)


def test_a_penalty_on_the_weights_alone_is_a_loss_of_the_model() -> None:
    training = Training()
    training.model(ones()).sum().backward()
    penalty: Any = sum(weight.norm() for weight in training.model.parameters())
    (penalty * math.nan).backward()
    expect_trip(training.notebook.trip_of(training.optimizer.step), 2)


@pytest.mark.parametrize("options", [*({"ignore": [pattern]} for pattern in ("loss", "*:loss", "l*")), {"policy": "off"}])
def test_a_loss_that_may_not_trip_is_only_measured(options: dict[str, Any]) -> None:
    training = Training(**options)
    (training.model(ones()).sum() * math.nan).backward()
    assert training.notebook.trips == []
    assert math.isnan(losses(training.notebook)[-1][2])


# --- loss scaling ---------------------------------------------------------------------------------------------------------


def test_the_reading_is_the_loss_before_it_was_scaled() -> None:
    training = ScaledTraining(init_scale=2.0**127)
    expected = []
    for batch in range(6):
        loss = (10 - training.model(ones())).square().sum()
        expected.append((batch, "loss", pytest.approx(float(loss))))
        training.step(training.scaler.scale(loss))
    assert training.scaler.get_scale() < 2.0**127
    assert training.notebook.trips == []
    assert losses(training.notebook) == expected


def test_what_was_made_of_a_scaled_loss_is_divided_by_its_scale() -> None:
    training = ScaledTraining()
    first, second = training.model(ones()).sum(), training.model(ones()).square().sum()
    training.step((training.scaler.scale(first) + training.scaler.scale(second)) / 2)
    assert [value for _, _, value in losses(training.notebook)] == [pytest.approx(abs(float(first + second) / 2))]
    training.step(torch.stack(training.scaler.scale([training.model(ones()).sum()])).sum() * math.inf)
    assert training.notebook.trips == []


def test_a_list_of_losses_is_known_without_its_scale() -> None:
    training = ScaledTraining()
    out = training.model(ones())
    torch.autograd.backward(training.scaler.scale([out.sum() * 2, out.sum() * 3]))
    total = abs(float(out.sum()))
    assert [(label, value) for _, label, value in losses(training.notebook)] == [
        ("loss[0]", pytest.approx(2 * total)), ("loss[1]", pytest.approx(3 * total)),
    ]  # fmt: skip


def test_an_engines_scale_divides_the_loss_and_its_inf_is_absorbed_for_a_while() -> None:
    scale = [256.0]
    model, _, notebook = watching(loss_scale=lambda: scale[0], max_scale_shrinks=3)
    loss = model(ones()).sum()
    (loss * scale[0]).backward()
    assert losses(notebook) == [(0, "loss", pytest.approx(abs(float(loss))))]
    with suppress(OverflowDetected):
        for _ in range(20):
            (model(ones()).sum() * math.inf).backward()
            scale[0] /= 2
    trip = expect_trip(notebook.trip, 4, state=State.INF)
    assert trip.bad_since == 1
    assert "since batch 1" in classify(trip)[1]


@pytest.mark.parametrize("options", [{}, {"every": 7}, {"check": "batch"}, {"check": "async"}])
def test_a_scale_that_shrinks_without_end_ends_in_a_trip(options: dict[str, Any]) -> None:
    training = ScaledTraining(**options)
    training.batch(bad=False)
    with suppress(OverflowDetected):
        for _ in range(95):
            training.batch(bad=True)
    trip = training.notebook.trip
    assert (trip.position.batch, trip.frame.spec.phase, trip.culprit.kind) == (11, Phase.BACKWARD, Kind.GRAD_OUTPUT)
    assert trip.bad_since == 1
    assert "since batch 1" in classify(trip)[1]


def test_a_scale_that_recovers_in_time_is_no_trip() -> None:
    training = ScaledTraining()
    for _ in range(4):
        for _ in range(9):
            training.batch(bad=True)
        training.batch(bad=False)
    assert training.notebook.trips == []


@pytest.mark.parametrize("gradients", [False, True])
def test_two_scalers_do_not_mix(gradients: bool) -> None:
    """A GAN with two scalers, one of which shrinks for ever, while the other one is well."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))
    _, of_generator = watched(generator, gradients=gradients)
    _, of_discriminator = watched(discriminator, gradients=gradients)
    scalers = [torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=1) for _ in range(2)]
    steps = [sgd(generator, 1e-9), sgd(discriminator, 1e-9)]
    with suppress(OverflowDetected):
        for _ in range(95):
            fake = generator(ones())
            for number, loss in enumerate(
                (multiplied(generator(ones()), math.inf).sum(), discriminator(fake.detach()).mean())
            ):
                scalers[number].scale(loss).backward()
                scalers[number].step(steps[number])
                scalers[number].update(min(2.0**40, float(scalers[number].get_scale()) * 2) if number else None)
                steps[number].zero_grad()
    assert of_discriminator.trips == []
    trip = of_generator.trip
    assert trip.loss_scale == (64.0 if gradients else 1.0)
    assert trip.bad_since >= 0


# --- the training is unchanged --------------------------------------------------------------------------------------------


@every_check
def test_no_loss_outlives_its_batch(check: str) -> None:
    model, _, notebook = watching(check=check)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    loss = model(ones()).square().mean()
    scaled = scaler.scale(loss)
    alive = ref(loss), ref(loss.untyped_storage()), ref(scaled)
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    del loss, scaled
    gc.collect()
    assert [one() for one in alive] == [None, None, None]
    assert len(losses(notebook)) == 1


def test_a_users_error_has_no_frame_of_ours_and_the_next_loss_is_its_own() -> None:
    model, detector, notebook = watching()
    with pytest.raises(RuntimeError, match="grad can be implicitly created") as caught:
        model(ones()).backward()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sys.version_info < (3, 11) or not any("rankwatch/hook" in name for name in files)
    model(ones()).sum().backward()
    assert [batch for batch, _, _ in losses(notebook)] == [1]
    assert detector.fault == ""


def test_without_a_watch_nothing_is_looked_at() -> None:
    model, _, notebook = watching()
    unwatch()
    (model(ones()).sum() * math.nan).backward()
    assert losses(notebook) == []


def test_the_frame_of_a_loss_is_the_roots_without_a_module_name() -> None:
    model, _, notebook = watching()
    model(ones()).sum().backward()
    frame: Frame = notebook.frames()[-1]
    assert (frame.spec.module, frame.spec.module_class, frame.spec.phase) == ("", "Sequential", Phase.FORWARD)
    assert [(reading.label, reading.dtype) for reading in frame.readings] == [("loss", "float32")]
