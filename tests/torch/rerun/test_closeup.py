"""The close-up of a trip: where the line is, whether it recurs, in which precision it is finite, and that it harms nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankwatch
from closeups import late, line_of, place, the_only, tripped
from models import Calls
from notebook import first_weight, sgd, watched
from rankwatch.errors import OverflowDetected
from rankwatch.rerun import close_up_runs as closeup
from rankwatch.shared.types.frame import State
from rankwatch.shared.types.trip import Cause
from rankwatch.shared.words.cause import classify
from trainings.parts import Root

NAN, INF = float("nan"), float("inf")
ONES = torch.ones(2, 4)


# --- where the line is -------------------------------------------------------------------------------------------------


def block(self: Root, x: Tensor) -> Any:
    hidden = self.first(x)  # a_linear
    return self.norm(hidden * 0)  # a_norm


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
@pytest.mark.parametrize(
    ("weight", "module", "operator", "line"),
    [
        (1e38, "0.first", "aten.addmm.default", "a_linear"),
        (1.0, "0.norm", "aten.native_layer_norm.default", "a_norm"),
    ],
)
def test_a_module_of_torch_has_the_line_of_its_call(
    weight: float, module: str, operator: str, line: str, check: str
) -> None:
    model = nn.Sequential(Root(block, first=nn.Linear(4, 4), norm=nn.LayerNorm(4, eps=0.0)))
    with torch.no_grad():
        model.get_parameter("0.first.weight").fill_(weight)
    trip, found = late(model, ONES * 1e3, check=check)
    assert trip.frame.spec.module == module
    assert place(found) == (operator, line_of(line, __file__))


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_the_call_of_the_model_is_the_line_where_it_has_no_code_of_the_users(check: str) -> None:
    model = nn.Sequential(nn.LayerNorm(4, eps=0.0))
    _, notes = watched(model, check=check)
    _, found = the_only(notes, lambda: [model(ONES) for _ in range(2)])  # the_model
    assert place(found)[1] == line_of("the_model", __file__)


@dataclass
class Given:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_keyword_and_dataclass_inputs(check: str) -> None:
    model = Calls(lambda *, given, scale: given.x * scale / given.y)  # of_given
    _, notes = watched(model, check=check)
    _, found = the_only(notes, lambda: [model(given=Given(ONES, ONES * 0), scale=2.0) for _ in range(2)])
    assert place(found) == ("aten.div.Tensor", line_of("of_given", __file__))
    assert found.operator is not None
    assert found.operator.shapes == ((2, 4), (2, 4))
    assert found.recurred == 3


@pytest.mark.parametrize("check", ["frame", "batch"])
def test_what_was_born_between_modules_is_found_in_the_forward_around_them(check: str) -> None:
    model = Root(lambda self, x: self.body(x / (x - 1)), body=nn.Linear(4, 4))  # between
    trip, found = tripped(model, ONES, watch={"check": check})
    assert (trip.frame.spec.module, trip.operator) == ("body", None)  # the module's own operators are not to blame
    assert classify(trip)[0] is Cause.UPSTREAM
    assert place(found) == ("aten.div.Tensor", line_of("between", __file__))
    assert found.recurred == 3


def test_the_module_is_named_in_a_batch_in_which_only_the_root_was_measured() -> None:
    model = nn.Sequential(Calls(lambda x: x), nn.Sequential(Calls(lambda x: x / 0)))
    _, notes = watched(model, every=2, first_batch=1)
    trip, found = the_only(notes, model, ONES)
    assert trip.frame.spec.module == "1.0"
    assert found.operator is not None
    assert found.operator.name == "aten.div.Tensor"


def test_numbers_that_numpy_computed_are_said_to_be_made_elsewhere() -> None:
    model = Calls(lambda x: x + torch.from_numpy(np.array([1, np.inf])))  # numpy
    trip, found = tripped(model, torch.ones(2))
    assert place(found)[1] == line_of("numpy", __file__)
    assert "the code makes a tensor of numbers that hold inf" in classify(trip)[1]


def test_a_marked_tensor_is_found_in_the_forward_around_it() -> None:
    model = Root(lambda self, x: rankwatch.detect_overflow(self.body(x).log() * 0, "scores") or x, body=nn.ReLU())  # marked
    with rankwatch.watch(model) as watch:
        with pytest.raises(OverflowDetected):
            model(-ONES)
        found = watch._reports.closeup
    assert found is not None
    assert place(found) == ("aten.log.default", line_of("marked", __file__))
    assert found.recurred == 3


# --- does it recur? ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
@pytest.mark.parametrize("value", [INF, NAN])
def test_an_output_that_was_poisoned_once_from_outside_does_not_recur(check: str, value: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    poison = [value]

    def spoil(module: nn.Module, args: Any, output: Tensor) -> None:
        if poison:
            output.detach()[0, 0] = poison.pop()

    model[0].register_forward_hook(spoil)
    trip, found = late(model, ONES, check=check)
    assert (trip.recurs, found.recurred, found.of, found.operator) == (False, 0, 3, None)
    assert not found.precision
    cause, evidence = classify(trip)
    assert cause is Cause.UNEXPLAINED
    assert "run again" in evidence


def test_a_module_that_draws_is_repeated_from_the_random_state_at_its_beginning() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), Calls(lambda x: 1 / x.abs().clamp(max=1)))
    torch.manual_seed(3)
    _, found = tripped(model, torch.randn(2, 4))
    assert (found.recurred, found.of) == (3, 3)
    assert found.operator is not None
    assert found.operator.name.startswith("aten.reciprocal")


def test_a_rare_draw_recurs_as_the_root_was_entered_with_it() -> None:
    draws = Calls(lambda x: torch.where(torch.rand(()) < 0.001, x / 0, x))  # an inf for one number in a thousand
    model = nn.Sequential(nn.Dropout(0.5), draws)
    _, notes = watched(model)

    def train() -> None:
        for number in range(100_000):
            torch.manual_seed(number)
            model(ONES)

    _, found = the_only(notes, train)
    assert (found.recurred, found.of, found.note) == (3, 3, "")


def test_other_random_numbers_make_it_unknown_whether_it_recurs() -> None:
    model = Calls(lambda x: x / 0 if random.random() < 0.002 or np.random.rand() < 0.002 else x * 1)
    random.seed(0)
    np.random.seed(0)
    _, notes = watched(model)
    trip, found = the_only(notes, lambda: [model(ONES) for _ in range(100_000)])
    assert (trip.recurs, found.recurred, found.of) == (None, 0, 0)
    assert "it draws random numbers, and drew others" in found.note


def counts_to_three(self: Root, x: Tensor) -> Tensor:
    self.calls = self.calls + 1
    return x / 0 if self.calls == 3 else x


def test_a_number_that_its_module_counts_is_as_it_was() -> None:
    model = Root(counts_to_three, calls=0)
    _, notes = watched(model)
    trip, found = the_only(notes, list, map(model, [ONES] * 3))
    assert (trip.recurs, found.recurred, found.of, model.calls) == (True, 3, 3, 3)


def test_another_attribute_that_a_forward_changes_makes_it_unknown_whether_it_recurs() -> None:
    model = Root(counts_to_three, calls=torch.tensor(0))
    _, notes = watched(model)
    trip, found = the_only(notes, list, map(model, [ONES] * 3))
    assert (trip.recurs, found.of, model.calls) == (None, 0, 3)
    assert "it changes calls of its own" in found.note
    assert classify(trip)[0] is not Cause.UNEXPLAINED


def carries(self: Root, x: Tensor) -> Any:
    self.carried = torch.add(x.detach(), self.carried, alpha=1e13)
    return self.last(torch.add(x, self.carried))


def test_a_state_that_the_model_keeps_is_not_said_to_have_been_bad_before() -> None:
    model = Root(carries, last=nn.Linear(4, 4), carried=torch.ones(2, 4))
    _, notes = watched(model)
    trip, found = the_only(notes, list, map(model, [ONES] * 4))
    assert trip.frame.spec.module == "last"
    assert (found.operator, found.note) == (None, "it changes carried of its own, which may have been different before")


# --- in which precision? -----------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A cache, of which a forward reads one row more than it has written."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.full((3, 4), float("nan")))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:2] = x.detach()
        return x + self.cache[: int(x[0, 0])].mean(0)


def test_what_was_bad_before_is_named_and_of_a_buffer_what_read_it() -> None:
    def noted(model: nn.Module, *batches: Tensor, every: int = 1) -> str:
        _, notes = watched(model, every=every)
        return the_only(notes, list, map(model, batches))[1].note

    last = nn.Linear(4, 4)
    line = Rows.forward.__code__.co_firstlineno + 2
    read = f"the buffer 0.cache was already nan; aten.mean at test_closeup.py:{line} read it first"
    assert noted(nn.Sequential(Rows(), last), 2 * ONES, 3 * ONES) == read
    assert noted(nn.Sequential(last), ONES, ONES / 0) == "the input was already inf"
    with torch.no_grad():
        last.weight[0, 0] = float("nan")
    model = Root(lambda self, x: nn.functional.linear(x, self.last.weight), last=last)
    assert noted(model, ONES, ONES, every=2) == "the weight last.weight was already nan"


def test_the_largest_number_of_the_wide_output() -> None:
    _, found = tripped(Calls(lambda x: (x @ x.t()).clamp(min=1)), torch.full((4, 4), 300.0, dtype=torch.float16))
    rows = [(row.dtype, row.state, row.abs_max) for row in found.precision]
    assert rows == [("float32", State.FINITE, 360000.0), ("float64", State.FINITE, 360000.0)]


def test_autocast_and_casts_of_the_users_are_wide_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Calls(lambda x: x.half() * 4))
    with torch.no_grad():
        first_weight(model).fill_(100.0)
    with torch.autocast("cpu", torch.float16):
        trip, found = tripped(model, ONES * 50)
        assert torch.is_autocast_enabled("cpu")
    assert trip.frame.spec.module == "1"
    assert [(row.state, row.abs_max) for row in found.precision] == [(State.FINITE, 80000.0)] * 2


def test_a_module_in_float64_has_no_narrower_row() -> None:
    _, found = tripped(Calls(lambda x: x / 0), ONES.double())
    assert [(row.dtype, row.state) for row in found.precision] == [("float64", State.INF)]


def test_a_fused_kernel_that_is_the_origin_is_not_hidden_by_a_plain_one() -> None:
    """The products overflow before they are scaled; the plain kernel scales first."""
    x = torch.full((1, 2, 4, 4), 3e19)
    _, found = tripped(Calls(lambda x: F.scaled_dot_product_attention(x, x, x / 3e19, scale=1e-6)), x)
    assert [(row.dtype, row.state) for row in found.precision] == [("float32", State.NAN), ("float64", State.FINITE)]
    assert found.note == "in float32 it is nan by fused attention, and finite by the plain kernels of torch"


def test_attention_recurrent_layers_and_batch_norm_in_half() -> None:
    half = torch.full((1, 2, 4, 4), 600.0, dtype=torch.float16)
    _, found = tripped(Calls(lambda x: F.scaled_dot_product_attention(x, x, x) * 200), half)
    assert [row.state for row in found.precision] == [State.FINITE] * 2
    lstm = nn.LSTM(4, 4)
    _, found = tripped(Root(lambda self, x: self.lstm(x)[0] * 1e38 * 1e3, lstm=lstm), torch.rand(2, 3, 4) + 1)
    assert [row.state for row in found.precision] == [State.INF, State.FINITE]
    norm = nn.BatchNorm1d(4)
    _, found = tripped(Root(lambda self, x: self.norm(x) * 1e38 * 1e3, norm=norm), torch.randn(8, 4))
    assert [row.state for row in found.precision] == [State.INF, State.FINITE]
    assert norm.num_batches_tracked == 1


# --- it harms nothing --------------------------------------------------------------------------------------------------


def everything(self: Root, x: Tensor) -> Any:
    """Changes all that a forward may: buffers, attributes, random states; and has a place for a fault."""
    self.calls += 1
    self.seen.append(self.calls)
    self.cache["last"] = x
    self.steps += 1
    drawn = random.random() + float(np.random.rand())
    hidden = checkpoint(self.inner, x, use_reentrant=False) * drawn
    hidden = self.drop(self.norm(hidden))
    return torch.log(hidden * 0) if self.fault else hidden


def after_training(options: dict[str, Any] | None) -> list[Any]:
    """All state after three batches, in the second of which a watched model trips."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    inner, norm, drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
    model: Any = Root(everything, inner=inner, norm=norm, drop=drop, calls=0, seen=[], cache={}, fault=False)
    model.register_buffer("steps", torch.zeros(()))
    optimizer = sgd(model, 0.1)
    notes = watched(model, **options)[1] if options is not None else None
    outputs = []
    for number in range(3):
        model.fault = number == 1
        try:
            loss = model(torch.randn(8, 4)).sum()
            outputs.append(loss.detach())
        except OverflowDetected:
            outputs.append(None)
            loss = None
        if loss is not None and number != 1:
            loss.backward()
            optimizer.step()
        random.random()
    if notes is not None:
        assert notes.closeups[0].of == 3
    gradients = [value.grad for value in model.parameters()]
    kept = [model.calls, list(model.seen), sorted(model.cache), random.random(), float(np.random.rand())]
    return [outputs[0], outputs[2], torch.rand(3), *model.state_dict().values(), *gradients, *kept]


def test_without_a_close_up_the_operator_is_found() -> None:
    _, notes = watched(model := Calls(lambda x: x / 0), closeup=0)
    with pytest.raises(OverflowDetected):
        model(ONES)
    assert (notes.closeups, notes.trip.has_closeup) == ([], False)
    assert notes.trip.operator is not None


@pytest.mark.parametrize("options", [{}, {"check": "batch"}, {"gradients": True}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_training_that_goes_on_is_bitwise_as_without_a_watch(options: dict[str, Any]) -> None:
    for one, other in zip(after_training(None), after_training(options), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_the_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("rankwatch.rerun.close_up_runs.time.monotonic", lambda: clock[0])

    def slow(x: Tensor) -> Tensor:
        clock[0] += 1.4
        return x / 0

    _, found = tripped(Calls(slow), ONES, watch={"closeup": 3.0})
    assert (found.recurred, found.of, found.precision) == (3, 3, ())
    assert found.note == "no time for more: one forward takes 1.4 s"


def test_memory_is_looked_at_before_and_an_end_of_it_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closeup, "_free_memory", lambda forward: 100.0)
    _, found = tripped(Calls(lambda x: x / 0), ONES)
    assert (found.recurred, found.precision) == (3, ())
    assert found.note == "not run in float32: too little memory is free"
    calls = [0]

    def greedy(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x / 0

    _, found = tripped(Calls(greedy), ONES)
    assert (found.recurred, found.of) == (1, 1)
    assert "out of memory as it was run again" in found.note


def test_an_input_that_was_changed_in_place_is_not_run_again() -> None:
    _, found = tripped(Calls(lambda x: x.exp_()), ONES * 1000)
    assert (found.of, found.note) == (0, "not run again: what the model was given has been changed in place since")


def test_it_ends_when_the_verdict_names_another_rank() -> None:
    wanted = [True]
    ran: list[int] = []

    def forward(x: Tensor) -> Tensor:
        ran.append(1)
        wanted[0] = len(ran) < 3  # the verdict comes in the second run
        return x / 0

    _, notes = watched(Calls(forward))
    notes.is_wanted = lambda: wanted[0]  # type: ignore[method-assign]
    assert notes.detector is not None
    _, found = the_only(notes, notes.detector.root, ONES)
    assert (found.recurred, found.of, found.precision, len(ran)) == (1, 1, (), 3)
    assert found.note == "stopped: the run has ended meanwhile"


def test_one_close_up_is_enough() -> None:
    model = Calls(lambda x: x / 0)
    _, notes = watched(model)
    for _ in range(3):
        with pytest.raises(OverflowDetected):
            model(ONES)
    assert [trip.has_closeup for trip in notes.trips] == [True, False, False]
    assert len(notes.closeups) == 1


@pytest.mark.parametrize("check", ["frame", "batch"])
def test_it_comes_also_where_the_forward_raises_by_itself(check: str) -> None:
    def careful(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        assert y.isfinite().all()
        return y

    model = Root(careful, inner=Calls(lambda x: x / 0))
    _, notes = watched(model, check=check)
    with pytest.raises(OverflowDetected if check == "frame" else AssertionError):
        model(ONES)
    assert len(notes.closeups) == 1
    assert notes.closeups[0].recurred == 3


def test_a_bound_that_is_too_short_is_said() -> None:
    _, found = tripped(Calls(lambda x: x / 0), ONES, watch={"closeup": 1e-9})
    assert (found.recurred, found.of, found.precision) == (1, 1, ())
    assert found.note.startswith("no time for more: one forward takes")
    assert found.operator is not None
