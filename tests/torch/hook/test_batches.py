"""Trainings in which no training-mode forward of the root shows a batch: direct calls of modules, eval mode, frozen roots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from notebook import Fragile, Gain, Notebook, learn, model_of, ones, sgd, take_step, watched, watching
from rankwatch.errors import BatchLimitReached
from rankwatch.judge.lifecycle import DIRECT_FRAMES
from rankwatch.shared.types.frame import Kind, Phase, Position
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.cause import classify
from rankwatch.shared.words.text import describe_trip
from trainings.parts import Gain as Doubtful
from trainings.parts import Through, multiplied

every_check = pytest.mark.parametrize("check", ["frame", "batch", "async"])


class AutoEncoder(nn.Module):
    """A model whose root is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder: Any = nn.Sequential(nn.Linear(4, 4), Gain())
        self.decoder: Any = nn.Sequential(nn.Linear(4, 4), Gain())

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out

    def decode(self, z: Tensor) -> Tensor:
        out: Tensor = self.decoder(z)
        return out

    @property
    def gain(self) -> Gain:
        return self.decoder[1]  # type: ignore[no-any-return]


def autoencode(model: AutoEncoder) -> None:
    (model.decode(model.encode(ones())) - ones()).square().mean().backward()


def train(step: Callable[[], None], optimizer: torch.optim.Optimizer, batches: int = 1) -> None:
    for _ in range(batches):
        step()
        take_step(optimizer)


def train_root(model: nn.Module, batches: int = 1, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or sgd(model)
    for _ in range(batches):
        learn(model(ones()).sum(), optimizer)


def batches_of(notebook: Notebook, phase: Phase = Phase.FORWARD) -> dict[int, list[str]]:
    """The modules of each batch that was sent."""
    found: dict[int, list[str]] = {}
    for table, summary in notebook.batches:
        frames = [frame for frame in summary.frames(table) if frame.readings[0].kind is not Kind.LOSS]
        names = [frame.spec.module for frame in frames if frame.spec.phase is phase]
        if names:
            found.setdefault(summary.batch, []).extend(names)
    return found


def steps_of(notebook: Notebook) -> list[tuple[int, int]]:
    return [(summary.batch, summary.optimizer_step) for _, summary in notebook.batches]


ROOTS = ["0", "1", "2", ""]
CALLS = ["encoder.0", "encoder.1", "encoder", "decoder.0", "decoder.1", "decoder"]


# --- a root that is never called ------------------------------------------------------------------------------------------


@every_check
def test_direct_calls_with_a_backward_are_a_batch(check: str) -> None:
    model = AutoEncoder()
    detector, notebook = watched(model, check=check)
    train(lambda: autoencode(model), sgd(model), batches=4)
    detector.remove()
    assert batches_of(notebook) == dict.fromkeys(range(4), CALLS)
    assert steps_of(notebook) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert len({table.id for table, _ in notebook.batches}) == 1
    assert [summary.first_frame for _, summary in notebook.batches] == [0] * 4


@every_check
def test_a_nan_in_a_direct_call_has_its_batch_and_module(check: str) -> None:
    model = AutoEncoder()
    _, notebook = watched(model, check=check)
    optimizer = sgd(model)
    train(lambda: autoencode(model), optimizer, batches=3)
    model.gain.gain = math.nan
    trip = notebook.trip_of(train, lambda: autoencode(model), optimizer, 2)
    assert (trip.position, trip.optimizer_step) == (Position(3, 0, 4), 3)
    assert (trip.frame.spec.module, classify(trip)[0]) == ("decoder.1", Cause.INVALID)


def test_what_the_first_direct_call_was_fed_is_data() -> None:
    model = AutoEncoder()
    _, notebook = watched(model)
    trip = notebook.trip_of(model.encode, ones() * math.nan)
    assert classify(trip) == (Cause.DATA, "encoder.0:input[0] was nan before any module ran")


@pytest.mark.parametrize("where", ["parameterless", "first"])
def test_the_first_batch_is_batch_0_in_every_text(where: str) -> None:
    model = AutoEncoder()
    _, notebook = watched(model)
    model.gain.gain = math.nan
    trip = notebook.trip_of(*((model.gain, ones()) if where == "parameterless" else (model.encode, ones() * math.inf)))
    assert trip.position.batch == 0
    assert "batch 0 (optimizer step 0)" in describe_trip("rank 0", trip)


def test_the_backward_of_direct_calls_is_watched() -> None:
    model = AutoEncoder()
    model.decoder[1] = Through()
    _, notebook = watched(model, gradients=True)
    optimizer = sgd(model)
    train(lambda: autoencode(model), optimizer, batches=3)
    assert set(batches_of(notebook, Phase.BACKWARD)) == {0, 1, 2}
    assert {"decoder.1", "encoder.0", "decoder.0"} <= set(batches_of(notebook, Phase.BACKWARD)[2])
    model.gain.gain = math.nan
    trip = notebook.trip_of(autoencode, model)
    assert (trip.position.batch, trip.frame.spec.phase) == (3, Phase.BACKWARD)
    assert (trip.frame.spec.module, trip.culprit.label) == ("decoder.1", "grad_input[0]")


def test_micro_batches_of_direct_calls_are_batches() -> None:
    model = AutoEncoder()
    _, notebook = watched(model)

    def step() -> None:
        for _ in range(3):
            autoencode(model)

    train(step, sgd(model), batches=2)
    assert steps_of(notebook) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]


def test_two_views_with_one_backward_are_one_batch() -> None:
    model = AutoEncoder()
    _, notebook = watched(model)
    optimizer = sgd(model)
    for _ in range(2):
        learn((model.encode(ones()) - model.encode(ones() * 2)).square().mean(), optimizer)
    assert batches_of(notebook) == dict.fromkeys(range(2), CALLS[:3] * 2)


def test_direct_calls_without_gradients_are_no_batches() -> None:
    model = AutoEncoder()
    detector, notebook = watched(model)
    optimizer = sgd(model)
    for _ in range(2):
        train(lambda: autoencode(model), optimizer)
        with torch.no_grad():
            model.decode(model.encode(ones()))
        with torch.inference_mode():
            model.encode(ones())
    assert batches_of(notebook) == dict.fromkeys(range(2), CALLS)
    assert detector.progress.position.batch == 1


@every_check
def test_direct_calls_that_no_backward_reaches_are_no_batches(check: str) -> None:
    model = AutoEncoder()
    detector, notebook = watched(model, check=check)
    optimizer = sgd(model)
    for _ in range(3):
        model.eval()
        model.encode(ones())  # an evaluation that forgot no_grad
        model.train()
        train(lambda: autoencode(model), optimizer)
    detector.remove()
    assert batches_of(notebook) == dict.fromkeys(range(3), CALLS)
    assert steps_of(notebook) == [(0, 0), (1, 1), (2, 2)]


def test_an_optimizer_step_shows_a_batch_whose_outputs_show_no_backward() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 4)})
    linear: Any = model["linear"]
    detector, notebook = watched(model)
    train(lambda: (linear(ones()).detach() * linear.weight.sum()).sum().backward(), sgd(model), batches=3)
    detector.remove()
    assert batches_of(notebook) == {batch: ["linear"] for batch in range(3)}


def test_calls_before_the_root_belong_to_its_batch_and_do_not_count_twice() -> None:
    model, _, notebook = watching()
    optimizer = sgd(model)
    numbers = []
    for _ in range(3):
        model[0](ones())
        model(ones()).sum().backward()
        numbers.append(notebook.batches[-1][1].batch)
        optimizer.step()
    assert numbers == [0, 1, 2]
    assert [len(names) for names in batches_of(notebook).values()] == [5, 5, 5]


def test_calls_before_the_root_whose_outputs_it_is_fed_are_in_its_batch_in_every_micro_batch() -> None:
    model, detector, _ = watching()
    optimizer = sgd(model)
    numbers = []
    for batch in range(6):
        hidden = model[0](ones())
        model(ones() * hidden.mean()).sum().backward()
        numbers.append(detector.position.batch)
        if batch % 2:
            optimizer.step()
    assert numbers == [0, 1, 2, 3, 4, 5]


def test_the_numbers_of_a_model_whose_root_is_called_are_as_before() -> None:
    model, detector, notebook = watching()
    optimizer = sgd(model)
    for batch in range(3):
        hidden = model(ones())
        assert detector.position == Position(batch, 0, 4)
        model[2](model[0](ones()) + hidden.sum()).sum().backward()  # a head on the root's output
        assert detector.position == Position(batch, 0, 7)  # with the loss
        model[0](ones())  # for a log
        optimizer.step()
        model[0](ones())
        model.eval()
        model(ones())
        assert detector.position == Position(batch, 1, 4)
        model.train()
    assert batches_of(notebook) == dict.fromkeys(range(3), ROOTS)


def test_a_container_of_a_gan_is_one_run_with_one_batch_for_each_backward() -> None:
    gan: Any = nn.ModuleDict({"generator": nn.Linear(4, 4), "discriminator": nn.Linear(4, 1)})
    _, notebook = watched(gan, gradients=True)
    optimizers = sgd(gan.generator), sgd(gan.discriminator)
    for _ in range(3):
        fake = gan.generator(ones())
        (gan.discriminator(fake.detach()).mean() - gan.discriminator(ones()).mean()).backward()
        optimizers[1].step()
        gan.discriminator(fake).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    found = batches_of(notebook)
    assert list(found) == [0, 1, 2, 3, 4, 5]
    assert found[4] == ["generator", "discriminator", "discriminator"]
    assert found[5] == ["discriminator"]


def test_checkpointed_direct_calls_are_a_batch() -> None:
    model = AutoEncoder()
    model.encoder[1], model.decoder[1] = nn.Sigmoid(), nn.Sigmoid()
    _, notebook = watched(model)

    def step() -> None:
        hidden = checkpoint(model.encoder, ones().requires_grad_(), use_reentrant=False)
        checkpoint(model.decoder, hidden, use_reentrant=False).sum().backward()

    train(step, sgd(model), batches=2)
    assert batches_of(notebook) == dict.fromkeys(range(2), CALLS)
    assert set(batches_of(notebook, Phase.RECOMPUTE)) == {0, 1}


def test_every_kth_batch_of_direct_calls_is_measured_and_all_are_counted() -> None:
    model = AutoEncoder()
    detector, notebook = watched(model, every=3)
    train(lambda: autoencode(model), sgd(model), batches=7)
    assert batches_of(notebook) == {0: CALLS, 3: CALLS, 6: CALLS}
    assert detector.position.batch == 6


def test_a_traced_batch_of_direct_calls_is_printed_once() -> None:
    model = AutoEncoder()
    _, notebook = watched(model, trace_batch_nums=[1])
    train(lambda: autoencode(model), sgd(model), batches=3)
    (trace,) = notebook.traces
    assert [frame.spec.module for frame in trace] == [*CALLS, ""]  # and the loss
    assert {frame.position.batch for frame in trace} == {1}


def test_a_limit_counts_batches_of_direct_calls() -> None:
    model = AutoEncoder()
    _, notebook = watched(model, abort_after_batch_num=2)
    with pytest.raises(BatchLimitReached, match="2"):
        train(lambda: autoencode(model), sgd(model), batches=9)
    assert set(batches_of(notebook)) == {0, 1, 2}


def test_calls_that_never_see_a_backward_take_no_memory() -> None:
    model = AutoEncoder()
    detector, notebook = watched(model)
    for _ in range(DIRECT_FRAMES // 2):
        model.encode(ones())
    held = detector._life.of_forward.part.frames
    assert len(held) < DIRECT_FRAMES
    assert notebook.batches == []
    train(lambda: autoencode(model), sgd(model))
    assert set(batches_of(notebook)) == {0}


# --- a root in eval mode, or frozen ---------------------------------------------------------------------------------------


@every_check
def test_an_eval_mode_forward_with_a_backward_is_a_batch(check: str) -> None:
    model = model_of().eval()
    detector, notebook = watched(model, check=check, gradients=True)
    train_root(model, 4)
    detector.remove()
    assert batches_of(notebook) == dict.fromkeys(range(4), ROOTS)
    assert set(batches_of(notebook, Phase.BACKWARD)) == set(range(4))
    assert steps_of(notebook) == [(batch, batch) for batch in range(4) for _ in range(2)]


@every_check
@pytest.mark.parametrize("bad", [0, 5])
def test_an_overflow_in_eval_mode_has_its_batch(check: str, bad: int) -> None:
    model = model_of().eval()
    _, notebook = watched(model, check=check)
    train_root(model, bad)
    model[1].gain = 1e39
    trip = notebook.trip_of(train_root, model, 2)
    assert (trip.position, trip.optimizer_step) == (Position(bad, 0, 1), bad)
    assert f"batch {bad} (optimizer step {bad})" in describe_trip("rank 0", trip)


@every_check
@pytest.mark.parametrize("trains_in", ["eval", "train"])
def test_a_sloppy_evaluation_is_no_batch(check: str, trains_in: str) -> None:
    model, detector, notebook = watching(check=check)
    for batch in range(4):
        model.eval()
        for _ in range(batch):
            model(ones())
        model.train(trains_in == "train")
        train_root(model)
        assert detector.position.batch == batch
    detector.remove()
    assert batches_of(notebook) == dict.fromkeys(range(4), ROOTS)
    assert steps_of(notebook) == [(batch, batch) for batch in range(4)]


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_rank_that_evaluates_alone_has_the_positions_of_the_others(is_direct: bool) -> None:
    positions = []
    for evaluations in (0, 2):
        model = model_of().eval()
        _, notebook = watched(model, gradients=True)

        def forward(model: nn.Sequential = model) -> Tensor:
            out: Tensor = model[2](model[1](model[0](ones()))) if is_direct else model(ones())
            return out

        optimizer = sgd(model)
        for _ in range(3):
            for _ in range(evaluations):
                forward()
            train(lambda: forward().sum().backward(), optimizer)
        if not is_direct:  # two evaluations by direct calls are one forward with the calls of the training
            for _ in range(evaluations):
                forward()
        model[1].gain = math.nan
        trip = notebook.trip_of(forward)
        positions.append(trip.position)
        assert set(batches_of(notebook)) == {0, 1, 2}
    assert positions[0] == positions[1] == Position(3, 0, 1)


def test_an_evaluation_between_training_batches_is_an_eval_as_before() -> None:
    model, detector, _ = watching()
    for batch in range(3):
        train_root(model)
        model.eval()
        for evaluation in range(1, 3):
            model(ones())
            assert detector.position == Position(batch, evaluation, 4)
        model.train()


def test_a_training_that_goes_on_in_eval_mode_is_counted_on() -> None:
    model, detector, notebook = watching(nn.Linear(4, 4), gain := Gain(), gradients=True)
    train_root(model, 2)
    model.eval()
    model(ones())
    train_root(model, 2)
    model.train()
    train_root(model, 2)
    assert batches_of(notebook) == {batch: ["0", "1", ""] for batch in range(6)}
    assert set(batches_of(notebook, Phase.BACKWARD)) == set(range(6))
    for table, summary in notebook.batches:
        numbers = [frame.position.frame for frame in summary.frames(table)]
        assert numbers == list(range(summary.first_frame, summary.first_frame + len(numbers)))
    model.eval()
    gain.gain = math.nan
    assert notebook.trip_of(model, ones()).position[:2] == (5, 1)  # whether it is trained is not known yet
    assert detector.fault == ""


def test_positions_never_go_back() -> None:
    """Elections rest on it: a rank has passed what its progress has passed."""
    model, detector, notebook = watching(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    seen = [detector.progress]

    def note(*_: Any) -> None:
        seen.append(detector.progress)

    for module in model:
        module.register_forward_hook(note)
        module.weight.register_post_accumulate_grad_hook(note)

    def evaluate() -> None:
        model(ones())
        with torch.no_grad():
            model(ones())

    torch.manual_seed(0)
    for draw in torch.randint(0, 8, (300,)).tolist():
        model.train(bool(draw & 1))
        if draw in (0, 1, 2):
            learn(model(ones()).sum(), optimizer)
        elif draw in (3, 4):
            learn(model[1](model[0](ones())).sum(), optimizer)
        elif draw == 5:
            model[1](ones())
        else:
            evaluate()
        note()
    assert [now for before, now in pairwise(seen) if now < before] == []
    assert list(batches_of(notebook)) == list(range(len(batches_of(notebook))))
    steps = [summary.optimizer_step for _, summary in notebook.batches]
    assert steps == sorted(steps)
    keys = [(summary.batch, summary.first_frame) for _, summary in notebook.batches]
    assert len(keys) == len(set(keys))


def test_a_frozen_root_with_an_adapter_before_it_has_batches() -> None:
    adapter = nn.Linear(4, 4)
    model = model_of().eval().requires_grad_(False)
    _, notebook = watched(model)
    optimizer = sgd(adapter)
    train(lambda: model(adapter(ones())).sum().backward(), optimizer, batches=4)
    assert batches_of(notebook) == dict.fromkeys(range(4), ROOTS)
    model[1].gain = math.nan
    assert notebook.trip_of(train, lambda: model(adapter(ones())).sum().backward(), optimizer).position == Position(4, 0, 1)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_frozen_root_with_a_head_after_it_has_batches(is_training: bool) -> None:
    head = nn.Linear(2, 1)
    model = model_of().train(is_training).requires_grad_(False)
    _, notebook = watched(model)
    for _ in range(3):
        train(lambda: head(model(ones())).mean().backward(), sgd(head))
        if not is_training:
            model(ones())  # an evaluation
    assert batches_of(notebook) == dict.fromkeys(range(3), ROOTS)
    assert [len(list(summary.frames(table))) for table, summary in notebook.batches] == [5, 5, 5]  # each with its loss


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_compiled_model_in_eval_mode_or_called_in_parts_has_batches(is_direct: bool) -> None:
    torch.compiler.reset()
    model = model_of(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)).train(is_direct)
    _, notebook = watched(model)
    compiled: list[Any] = [torch.compile(part, backend="eager", fullgraph=True) for part in (model, model[0], model[2])]

    def step() -> None:
        whole, first, last = compiled
        (last(first(ones())) if is_direct else whole(ones())).sum().backward()

    train(step, sgd(model), batches=3)
    assert batches_of(notebook) == dict.fromkeys(range(3), ["0", "2"] if is_direct else ROOTS)


def test_a_partly_frozen_model_in_eval_mode_has_batches() -> None:
    model = model_of().eval()
    model[0].requires_grad_(False)
    model[2].train()
    _, notebook = watched(model)
    train_root(model, 3, sgd(model[2]))
    assert batches_of(notebook) == dict.fromkeys(range(3), ROOTS)
    assert steps_of(notebook) == [(0, 0), (1, 1), (2, 2)]


def test_micro_batches_in_eval_mode_are_batches() -> None:
    model = model_of().eval()
    _, notebook = watched(model)

    def step() -> None:
        for _ in range(2):
            model(ones()).sum().backward()

    train(step, sgd(model), batches=2)
    assert steps_of(notebook) == [(0, 0), (1, 0), (2, 1), (3, 1)]


@pytest.mark.parametrize("was_trained_before", [False, True])
def test_two_eval_mode_forwards_with_one_backward_are_one_batch(was_trained_before: bool) -> None:
    model, _, notebook = watching(gradients=True)
    optimizer = sgd(model)
    if was_trained_before:
        train_root(model)
    model.eval()
    train(lambda: (model(ones()) * model(ones() * 2)).sum().backward(), optimizer, batches=2)
    first = int(was_trained_before)
    found = batches_of(notebook)
    assert [len(found[batch]) for batch in (first, first + 1)] == [8, 8]
    assert max(found) == first + 1
    keys = [(summary.batch, summary.first_frame) for _, summary in notebook.batches]
    assert len(keys) == len(set(keys))


def test_a_forward_that_raises_in_eval_mode_leaves_its_number_to_the_next() -> None:
    model = model_of(nn.Linear(4, 4), fragile := Fragile(-1.0)).eval()
    _, notebook = watched(model)
    with pytest.raises(ValueError, match="the user's own"):
        model(ones())
    fragile.gain = 1.0
    train_root(model, 2)
    assert batches_of(notebook) == {batch: ["0", "1", ""] for batch in range(2)}


def test_every_and_limit_and_trace_hold_in_eval_mode() -> None:
    model = model_of().eval()
    _, notebook = watched(model, every=2, trace_batch_nums=[1], abort_after_batch_num=3, first_batch=1)
    with pytest.raises(BatchLimitReached, match="3"):
        train_root(model, 9)
    assert batches_of(notebook) == {1: ROOTS, 2: ROOTS, 3: [""]}
    assert [frame.position.batch for frame in notebook.traces[0]] == [1] * 5
    assert len(notebook.traces) == 1


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("mode", ["train", "eval", "direct"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_micro_batches_whose_backwards_come_after_all_forwards_are_in_order(where: str, mode: str, order: int) -> None:
    """As in GPipe: of two ranks that go wrong in one step, the one whose micro-batch comes first has the earlier position."""

    def moment_of(bad: int) -> Position:
        gain = Doubtful(lambda x, by: x * by if where == "forward" else multiplied(x, by))
        model = nn.Sequential(nn.Linear(4, 4), gain, nn.Linear(4, 4)).train(mode == "train")
        optimizer = sgd(model)
        _, notebook = watched(model, gradients=where == "backward")

        def losses(batch: int) -> Iterator[Tensor]:
            for micro in range(4):
                gain.gain = math.nan if (batch, micro) == (2, bad) else 1.0
                yield (model[2](gain(model[0](ones()))) if mode == "direct" else model(ones())).sum()

        def step(batch: int) -> None:
            for loss in list(losses(batch))[::order]:
                loss.backward()
            take_step(optimizer)

        step(0)
        step(1)
        return notebook.trip_of(step, 2).position

    moments = [moment_of(bad) for bad in range(4)]
    by_backward = where == "backward" and mode != "train"
    assert moments[:: order if by_backward else 1] == sorted(set(moments))
