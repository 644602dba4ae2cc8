"""The gradient guard: a bad gradient never reaches the weights, and the line that made it is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from closeups import operator_of
from models import Calls
from notebook import Notebook, learn, sgd, take_step, watched
from rankwatch.errors import OverflowDetected, TrainingAborted
from rankwatch.measure import norms
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.cause import classify
from trainings.parts import Poisoned, Root, multiplied

BAD = 2
every_way = pytest.mark.parametrize("gradients", [False, True], ids=["guard", "gradients"])
both_checkpoints = pytest.mark.parametrize("use_reentrant", [True, False])


def root_of(x: Tensor) -> Tensor:
    return x.abs().sqrt()  # a root


def hidden(x: Tensor) -> Tensor:
    y = x.abs() - 1e-30
    return torch.where(y > 0, y.sqrt(), torch.zeros_like(y))


def of_a_function(x: Tensor) -> Any:
    return Poisoned.apply(x, 1.0 if bool(x.any()) else math.nan)  # type: ignore[no-untyped-call]


def hooked(x: Tensor) -> Tensor:
    y = x * 2
    if not bool(x.any()):
        y.register_hook(lambda gradient: gradient * math.nan)
    return y + 1


def model_of(call: Callable[[Tensor], Tensor] = root_of, *more: nn.Module) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), Calls(call), nn.Linear(4, 2), *more)


def loss_of(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(fed(number)).square().mean()
    return loss


def fed(number: int) -> Tensor:
    """In the bad batch it is 0, and what the first layer makes of it."""
    return torch.randn(3, 4) * float(number != BAD)


def train(step: Callable[[int], object], batches: int = BAD + 1) -> None:
    for number in range(batches):
        step(number)


def tripped(model: nn.Module, step: Callable[[int], object], *, steps: int = 4, **options: Any) -> Trip:
    """The only trip of a training; afterwards the weights are finite."""
    detector, notebook = watched(model, **options)
    with suppress(OverflowDetected):
        train(step, steps)
    assert detector.fault == ""
    assert all(bool(value.isfinite().all()) for value in model.parameters())
    (trip,) = notebook.trips
    return trip


def expect_no_trip(model: nn.Module, step: Callable[[int], object], batches: int = 6) -> None:
    detector, notebook = watched(model)
    train(step, batches)
    detector.remove()
    assert (notebook.trips, detector.fault) == ([], "")


def trained(
    model: nn.Module,
    loss: Callable[[int], Tensor] | None = None,
    *optimizers: torch.optim.Optimizer,
    then: Callable[[], object] = lambda: None,
) -> Callable[[int], None]:
    """A batch of a training; ``then`` comes between the backward and the step."""
    of, used = loss or partial(loss_of, model), optimizers or (sgd(model),)

    def step(number: int) -> None:
        of(number).backward()
        then()
        take_step(*used)

    return step


def clipped(model: nn.Module) -> Callable[[int], None]:
    return trained(model, then=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


LINES: dict[str, tuple[Any, str, str, int]] = {
    "a root": (root_of, "aten.div.Tensor", "SqrtBackward0", 1),
    "a norm": (lambda x: x.square().sum(-1, keepdim=True).sqrt() + x, "aten.div.Tensor", "SqrtBackward0", 0),
    "a branch": (hidden, "aten.sqrt.default", "", 2),
    "a power": (lambda x: x.abs().pow(0.5), "aten.pow.Tensor_Scalar", "PowBackward0", 0),
    "a deviation": (lambda x: x + x.var(-1, keepdim=True).sqrt(), "aten.div.Tensor", "SqrtBackward0", 0),
    "a quotient": (lambda x: torch.where(x.abs() > 0, 1 / x, x), "aten.reciprocal.default", "", 0),
    "a logarithm": (lambda x: x.abs().log().clamp(min=-5.0), "aten.div.Tensor", "LogBackward0", 0),
    "a function": (of_a_function, "aten.mul.Tensor", "PoisonedBackward", 1),
    "a hook": (hooked, "aten.mul.Tensor", "", 3),
}
"""Functions of a module, the operator of their backward that makes a nan, and in which of their lines it was called."""


@every_way
@pytest.mark.parametrize("name", LINES)
def test_the_line_whose_backward_made_it_is_named(name: str, gradients: bool) -> None:
    call, operator, node, line = LINES[name]
    check_line(call, gradients, operator, node, call.__code__.co_firstlineno + line)


@every_way
@both_checkpoints
def test_the_line_within_a_checkpoint_is_named(use_reentrant: bool, gradients: bool) -> None:
    line = root_of.__code__.co_firstlineno + 1
    check_line(
        lambda x: checkpoint(root_of, x, use_reentrant=use_reentrant), gradients, "aten.div.Tensor", "SqrtBackward0", line
    )


def check_line(call: Callable[[Tensor], Any], gradients: bool, name: str, node: str, line: int) -> None:
    model = model_of(call)
    trip = tripped(model, trained(model), gradients=gradients)
    operator = operator_of(trip)
    assert (trip.position.batch, trip.frame.spec.module, classify(trip)[0]) == (BAD, "1", Cause.GRADIENT)
    assert (operator.name, operator.node) == (name, node)
    assert operator.source is not None
    assert (operator.source.file, operator.source.line) == (__file__, line)
    assert (trip.recurs, trip.guarded, trip.unfound) == (True, not gradients, "")


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
@pytest.mark.parametrize("every", [1, 3])
def test_whenever_readings_are_judged(check: str, every: int) -> None:
    model = model_of()
    trip = tripped(model, trained(model), check=check, every=every)
    assert (trip.position.batch, trip.frame.spec.module, operator_of(trip).node) == (BAD, "1", "SqrtBackward0")


def micro_batches(model: nn.Module) -> Callable[[int], None]:
    optimizer = sgd(model)

    def step(number: int) -> None:
        loss_of(model, number).backward()
        if number % 4 == 3:
            take_step(optimizer)

    return step


def two_backwards(model: nn.Module) -> Callable[[int], None]:
    """Of one forward."""
    optimizer = sgd(model)

    def step(number: int) -> None:
        out = model(fed(number))
        out[:, 0].sum().backward(retain_graph=True)
        learn(out[:, 1].sum(), optimizer)

    return step


def a_closure(model: nn.Module) -> Callable[[int], object]:
    """The gradients are computed within the step."""
    optimizer = sgd(model)

    def gradients(number: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        return float(loss)

    return lambda number: optimizer.step(partial(gradients, number))


def two_forwards(model: nn.Module) -> Callable[[int], object]:
    """Of one backward."""
    return trained(model, lambda number: loss_of(model, 2 * number) + loss_of(model, 2 * number + 1))


def two_optimizers(model: Any) -> Callable[[int], object]:
    return trained(model, None, sgd(model[2]), sgd(model[0]))


@pytest.mark.parametrize("way", [micro_batches, two_forwards, two_backwards, clipped, a_closure, two_optimizers])
def test_however_it_is_trained(way: Callable[[nn.Module], Callable[[int], object]]) -> None:
    model = model_of()
    trip = tripped(model, way(model), steps=8)
    assert (trip.position.batch, trip.frame.spec.module, operator_of(trip).node) == (BAD, "1", "SqrtBackward0")


def failed(
    model: nn.Module, look: Callable[[Any], None], fails: type[Exception], **options: Any
) -> tuple[Notebook, TrainingAborted | None]:
    """A training that clips, with what the guard finds as an exception ends it."""
    step = trained(model, then=lambda: look(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, **options)))
    detector, notebook = watched(model)
    with pytest.raises(fails) as caught:
        train(step, 4)
    return notebook, detector.look_back(caught.value)


def is_asserted(norm: Tensor) -> None:
    assert norm.isfinite()


@pytest.mark.parametrize(
    ("look", "fails", "options"),
    [(bool, RuntimeError, {"error_if_nonfinite": True}), (is_asserted, AssertionError, {})],
    ids=["refused", "asserted"],
)
def test_an_exception_that_comes_before_the_step(
    look: Callable[[Any], None], fails: type[Exception], options: dict[str, bool]
) -> None:
    notebook, found = failed(model_of(), look, fails, **options)
    (trip,) = notebook.trips
    assert isinstance(found, OverflowDetected)
    assert (trip.position.batch, trip.frame.spec.module, operator_of(trip).node) == (BAD, "1", "SqrtBackward0")
    assert trip.guarded


def test_an_exception_in_the_backward_itself() -> None:
    model = model_of()
    detector, notebook = watched(model)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError) as caught:
        loss_of(model, BAD).backward()
    with torch.autograd.set_detect_anomaly(True):  # as in a training that has turned it on for good
        assert detector.look_back(caught.value) is not None
    (trip,) = notebook.trips
    assert (trip.frame.spec.module, operator_of(trip).node, trip.recurs) == ("1", "SqrtBackward0", True)


def test_an_exception_for_another_reason() -> None:
    notebook, found = failed(model_of(torch.tanh), lambda norm: print([][1]), IndexError)
    assert (notebook.trips, found) == ([], None)


def test_a_norm_that_torch_refuses_and_the_training_forgives() -> None:
    model = model_of()
    optimizer = sgd(model)
    detector, notebook = watched(model)
    for number in range(6):
        loss_of(model, number).backward()
        with suppress(RuntimeError):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
        optimizer.zero_grad()
    loss_of(model, 0)
    assert detector.look_back(KeyError("another reason")) is None
    assert notebook.trips == []


def scaled(
    model: nn.Module, loss: Callable[[int], Tensor], *, max_norm: float | None = None
) -> tuple[Callable[[int], None], torch.amp.GradScaler]:
    """A batch of a training under a scaler, which may clip its gradients."""
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(number: int) -> None:
        scaler.scale(loss(number)).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step, scaler


def test_a_norm_that_torch_refuses_under_a_scaler() -> None:
    """The scaler would skip the step: the gradient is none of the guard's business."""
    model = model_of()
    step, _ = scaled(model, partial(loss_of, model), max_norm=1.0)
    detector, notebook = watched(model)
    with pytest.raises(RuntimeError, match="non-finite") as caught:
        train(step)
    assert detector.look_back(caught.value) is None
    assert notebook.trips == []


def test_the_norm_that_clipping_computed_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(torch.tanh)
    optimizer = sgd(model)
    watched(model)
    model(torch.randn(3, 4)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    looked: list[int] = []
    of = norms.of

    def counted(values: list[Tensor]) -> list[Tensor]:
        looked.append(len(values))
        return of(values)

    monkeypatch.setattr(norms, "of", counted)
    optimizer.step()
    assert looked == []
    model(torch.randn(3, 4)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)
    looked.clear()
    optimizer.step()
    assert looked == [2]  # weight and bias of the last layer


def test_a_step_that_the_training_itself_leaves_out_is_its_own_business() -> None:
    model = model_of()
    optimizer = sgd(model)

    def step(number: int) -> None:
        loss_of(model, number).backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()

    expect_no_trip(model, step)


def test_a_step_that_was_left_out_is_not_blamed_for_a_later_one() -> None:
    model = model_of()
    optimizer = sgd(model)

    def step(number: int) -> None:
        loss_of(model, BAD if number in (1, 2) else 0).backward()
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()

    assert tripped(model, step).position.batch == 2


def test_gradients_that_the_training_mends_are_its_own_business() -> None:
    model = model_of()

    def mend() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0)

    expect_no_trip(model, trained(model, then=mend))


def test_large_gradients_whose_norm_overflows_are_no_trip() -> None:
    model = nn.Linear(4, 2).half()
    x = torch.ones(4, 4).half()
    # Each gradient is 60000: their norm is beyond float16.
    expect_no_trip(model, trained(model, lambda _: model(x).float().sum() * 15000, sgd(model, lr=1e-8)))


def test_a_scaler_skips_the_step_and_nothing_trips() -> None:
    model = model_of()
    step, scaler = scaled(model, partial(loss_of, model))
    expect_no_trip(model, step)
    assert scaler.get_scale() == 2.0**9


def test_the_line_of_a_gradient_that_no_scale_helps() -> None:
    model = model_of()
    step, _ = scaled(model, lambda number: loss_of(model, min(number, BAD)))
    trip = tripped(model, step, steps=30)
    assert (trip.bad_since, trip.frame.spec.module, operator_of(trip).node) == (BAD, "1", "SqrtBackward0")


@pytest.mark.parametrize("way", [trained, a_closure])
def test_a_training_that_is_asked_to_stop_keeps_its_weights(way: Callable[[nn.Module], Callable[[int], object]]) -> None:
    model = model_of()
    step = way(model)
    asked: list[Any] = []
    watched(model, stop=asked.append)
    for number in range(BAD + 1):
        before = [value.detach().clone() for value in model.parameters()]
        step(number)
    assert len(asked) == 1
    assert all(map(torch.equal, before, model.parameters()))


def test_an_optimizer_of_another_model_is_none_of_its_business() -> None:
    model, other = model_of(torch.tanh), nn.Linear(2, 2)
    other.weight.register_hook(lambda gradient: gradient * math.nan)
    expect_no_trip(model, trained(other, lambda _: other(model(torch.randn(3, 4))).sum()), batches=1)


def wrapped(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def in_part(model: Any, backend: Any) -> Any:
    model[1].compile(backend=backend)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("order", ["compiled first", "watched first", "watched within"])
@pytest.mark.parametrize("compiled", [wrapped, in_place, in_part])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_run_again_eagerly(compiled: Callable[[Any, Any], Any], order: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend("aot_eager")
    model: Any = model_of()
    called = model if order == "watched first" else compiled(model, graphs)
    detector, notebook = watched(model if order == "watched within" else called)
    called = compiled(model, graphs) if order == "watched first" else called
    trip = notebook.trip_of(train, trained(model, partial(loss_of, called)))
    assert (detector.fault, graphs.frame_count) == ("", 1)
    assert all(bool(value.isfinite().all()) for value in model.parameters())
    assert (trip.position.batch, trip.frame.spec.module, operator_of(trip).node) == (BAD, "1", "SqrtBackward0")
    source = operator_of(trip).source
    assert source is not None
    assert source.text.endswith("# a root")
    assert (trip.recurs, trip.guarded, trip.unfound) == (True, True, "")
    assert [(found.recurred, found.of, found.is_eager) for found in notebook.closeups] == [(3, 3, True)]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_gradient_that_compiled_code_alone_makes_bad() -> None:
    """What is said must not claim that the gradient came from elsewhere."""

    def spoiled(value: Tensor) -> Any:
        return multiplied(value, math.nan) if value.requires_grad else value

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *given: [spoiled(one) for one in graph(*given)]

    model: Any = model_of(torch.tanh)
    called: Any = torch.compile(model, backend=backend)
    _, notebook = watched(called)
    trip = notebook.trip_of(learn, loss_of(called, 0), sgd(model))
    assert trip.recurs is None
    assert "run again eagerly, it was finite: the compiled code made it, it came by" in classify(trip)[1]


def test_a_gradient_that_the_training_spoils_after_clipping() -> None:
    """Its norm is known, but not of what it is now."""
    model: Any = model_of(torch.tanh)
    optimizer = sgd(model)

    def step(number: int) -> None:
        loss_of(model, number).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if number == BAD:
            model[0].weight.grad = model[0].weight.grad * math.nan
            model[2].bias.grad.mul_(math.inf).mul_(0)
        take_step(optimizer)

    trip = tripped(model, step)
    assert (trip.position.batch, trip.frame.spec.module, trip.culprit.label) == (BAD, "2", "bias.grad")
    assert "the training changed it after the backward" in classify(trip)[1]


def test_a_model_that_returns_its_loss_beside_what_it_was_made_from() -> None:
    def whole(self: Root, x: Tensor) -> dict[str, Tensor]:
        logits: Tensor = self.net(x)
        return {"logits": logits, "loss": logits.square().mean()}

    model = Root(whole, net=model_of())
    trip = tripped(model, trained(model, lambda number: model(fed(number))["loss"]))
    assert (trip.frame.spec.module, operator_of(trip).node) == ("net.1", "SqrtBackward0")


def test_a_model_that_returns_what_another_output_was_made_from() -> None:
    """The gradient of the first one went bad in the model's own backward: the loss is not to blame."""

    def both(self: Root, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden: Tensor = self.net(x) if bool(x.any()) else self.net(x) * 0
        return hidden, hidden.abs().sqrt()

    def loss(number: int) -> Any:
        hidden, root = model(fed(number))
        return hidden.mean() + root.mean()

    model = Root(both, net=nn.Linear(4, 4))
    trip = tripped(model, trained(model, loss))
    cause, evidence = classify(trip)
    assert (cause, operator_of(trip).node) == (Cause.GRADIENT, "SqrtBackward0")
    assert "grad_output[0] became nan there, as the model makes another output from this one" in evidence
    assert "loss function" not in evidence


def test_the_random_numbers_are_those_of_the_batch() -> None:
    """One element of the mask decides."""
    model = model_of(lambda x: (x * (torch.rand(3, 4) > 0.001)).abs().sqrt())
    torch.manual_seed(1)
    trip = tripped(model, trained(model), steps=2000)
    assert (trip.frame.spec.module, trip.recurs) == ("1", True)


def test_what_a_module_counts_is_as_it_was() -> None:
    """The forward is bad in its third call alone."""

    def counts(self: Root, x: Tensor) -> Tensor:
        self.calls += 1
        return root_of(x * (self.calls != BAD + 1))

    model = model_of(Root(counts, calls=0))
    trip = tripped(model, trained(model, lambda _: model(torch.randn(3, 4)).square().mean()))
    assert (trip.position.batch, operator_of(trip).node, trip.recurs) == (BAD, "SqrtBackward0", True)
    assert model[1].call.calls == BAD + 1


def test_it_goes_on_as_without_a_watch() -> None:
    """A test that catches the trip finds weights, buffers, gradients and random numbers as the training left them."""

    def run(watches: bool) -> list[Tensor]:
        model = model_of(root_of, nn.BatchNorm1d(2), nn.Dropout(0.5))
        optimizer = sgd(model)
        torch.manual_seed(4)
        if watches:
            watched(model)
        for number in range(4):
            loss_of(model, number).backward()
            found = [value.grad.clone() for value in model.parameters() if value.grad is not None]
            if number == BAD and watches:
                with pytest.raises(OverflowDetected):
                    optimizer.step()
            elif number != BAD:
                optimizer.step()
            optimizer.zero_grad()
        return [*model.state_dict().values(), *found, torch.get_rng_state()]

    assert all(map(torch.equal, run(True), run(False)))


def test_the_option_turns_it_off() -> None:
    model = model_of()
    _, notebook = watched(model, guard=False)
    train(trained(model))
    assert notebook.trips == []
    assert not all(bool(value.isfinite().all()) for value in model.parameters())


class FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first.sum() + second.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.expand(2, 4), None


@pytest.mark.parametrize("gradients", [False, True])
def test_an_output_whose_gradient_is_none(gradients: bool) -> None:
    """A Function may return None for a gradient of 0, and hooks of torch are called with it."""
    model = Root(lambda self, x: (self.first(x), self.second(x)), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    optimizer = sgd(model)
    _, notebook = watched(model, gradients=gradients)
    for _ in range(2):
        FirstOnly.apply(*model(torch.ones(2, 4))).backward()
        optimizer.step()
    assert notebook.faults == []
    assert len(notebook.batches) >= 2


def test_nothing_is_kept_after_the_step() -> None:
    model = model_of(torch.tanh)
    optimizer = sgd(model)
    detector, _ = watched(model)
    loss_of(model, 0).backward()
    kept = detector._guard._kept
    assert [batch.run is not None for batch in kept] == [True]
    batch = kept[0]
    optimizer.step()
    assert (kept, batch.run) == ([], None)
