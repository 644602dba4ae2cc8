"""The close-up of a trip: the operator and the user's line, whether it recurs, and in which precision it is finite."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import notebook
import rankwatch
from models import Calls
from notebook import Notebook, first_weight, watched
from rankwatch.errors import OverflowDetected
from rankwatch.rerun import closeup
from rankwatch.shared.cause import Cause, Trip, classify
from rankwatch.shared.closeup import CloseUp
from rankwatch.shared.frame import State
from trainings import Root

HERE = Path(__file__)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _unwatch() -> Iterator[None]:
    yield
    notebook.unwatch()


def tripped(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Trip, CloseUp]:
    """The trip of one forward, and its close-up. ``watch``: the options of the watch."""
    _, notes = watched(model, **kwargs.pop("watch", {}))
    with pytest.raises(OverflowDetected):
        model(*args, **kwargs)
    return the_only(notes)


def the_only(notes: Notebook) -> tuple[Trip, CloseUp]:
    (trip,), (found,) = notes.trips, notes.closeups
    return trip, found


def line_of(mark: str) -> int:
    """The line of this file that ends with this mark."""
    (line,) = [number for number, text in enumerate(HERE.read_text().split("\n"), 1) if text.endswith(f"  # {mark}")]
    return line


# --- 40 mechanisms: the operator, and the line -------------------------------------------------------------------------

FINITE, BAD = "finite", "bad"


@dataclass(frozen=True)
class Mechanism:
    """``operator`` is torch's name of it; ``wide`` is whether it is finite in float64."""

    call: Callable[..., Any]
    operator: str
    wide: str
    given: tuple[Any, ...]

    def __str__(self) -> str:
        return self.call.__name__


MECHANISMS: list[Mechanism] = []


def mechanism(operator: str, *given: Any, wide: str = BAD) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        MECHANISMS.append(Mechanism(call, f"aten.{operator}", wide, given))
        return call

    return add


ONES = torch.ones(2, 4)
HALVES = torch.full((4, 4), 300.0, dtype=torch.float16)


@mechanism("exp.default", ONES * 100, wide=FINITE)
def an_exponential(x: Tensor) -> Tensor:
    scores = x * 2
    return torch.exp(scores)  # an_exponential


@mechanism("log.default", ONES * 0)
def the_log_of_zero(x: Tensor) -> Tensor:
    return (x + 0).log()  # the_log_of_zero


@mechanism("div.Tensor", ONES)
def a_division_by_zero(x: Tensor) -> Tensor:
    spread = x - x.mean()
    return x / spread  # a_division_by_zero


@mechanism("sqrt.default", -ONES)
def the_root_of_a_negative(x: Tensor) -> Tensor:
    return torch.sqrt(x)  # the_root_of_a_negative


@mechanism("rsqrt.default", ONES)
def a_norm_without_an_epsilon(x: Tensor) -> Tensor:
    variance = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    return x * torch.rsqrt(variance)  # a_norm_without_an_epsilon


@mechanism("pow.Tensor_Scalar", ONES * 1e30, wide=FINITE)
def a_power(x: Tensor) -> Tensor:
    return x**3  # a_power


@mechanism("pow.Tensor_Scalar", -ONES)
def a_broken_power_of_a_negative(x: Tensor) -> Tensor:
    return x.pow(0.5) if x.dim() == 3 else x.pow(0.7)  # a_broken_power_of_a_negative


@mechanism("_softmax.default", ONES)
def a_row_that_is_fully_masked(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[1] = True
    scores = x.masked_fill(mask, -INF)
    return scores.softmax(-1)  # a_row_that_is_fully_masked


@mechanism("mm.default", HALVES, wide=FINITE)
def a_product_in_half(x: Tensor) -> Tensor:
    return (x @ x.t()).float()  # a_product_in_half


@mechanism("sum.default", HALVES.repeat(4, 4), wide=FINITE)
def a_sum_in_half(x: Tensor) -> Tensor:
    total = x.sum()  # a_sum_in_half
    return total / x.numel()


@mechanism("cumsum.default", HALVES.reshape(-1).repeat(16), wide=FINITE)
def a_running_sum_in_half(x: Tensor) -> Tensor:
    return x.cumsum(0)  # a_running_sum_in_half


@mechanism("prod.default", ONES.flatten() * 1e20, wide=FINITE)
def a_long_product(x: Tensor) -> Tensor:
    return x.prod()  # a_long_product


@mechanism("native_layer_norm.default", ONES)
def a_layer_norm_without_eps(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,), eps=0.0)  # a_layer_norm_without_eps


@mechanism("nll_loss_forward.default", ONES, torch.full((2,), -100))
def a_cross_entropy_without_labels(x: Tensor, labels: Tensor) -> Tensor:
    hidden = x * 2
    return F.cross_entropy(hidden, labels)  # a_cross_entropy_without_labels


@mechanism("div.Tensor", ONES)
def two_helpers_down(x: Tensor) -> Tensor:
    return _outer(x)


def _outer(x: Tensor) -> Tensor:
    return _inner(x, x * 0)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return x / y  # two_helpers_down


class Loses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.log()  # a_function_of_the_users

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


@mechanism("log.default", ONES * 0)
def a_function_of_the_users(x: Tensor) -> Any:
    return Loses.apply(x)


@mechanism("sqrt_.default", ONES)
def in_place(x: Tensor) -> Tensor:
    y = x - 3
    y.mul_(2)
    y.sqrt_()  # in_place
    return y


@mechanism("mul.Tensor", ONES)
def with_a_number_that_is_inf(x: Tensor) -> Tensor:
    return x * INF  # with_a_number_that_is_inf


@mechanism("sub.Tensor", ONES * 0)
def a_difference_of_infinities(x: Tensor) -> Tensor:
    penalty = torch.full_like(x, -INF)
    return penalty - penalty  # a_difference_of_infinities


@mechanism("_to_copy.default", ONES * 1e5, wide=FINITE)
def a_cast_to_half(x: Tensor) -> Tensor:
    return x.half()  # a_cast_to_half


@mechanism("bmm.default", HALVES.expand(2, 4, 4).contiguous(), wide=FINITE)
def an_einsum_in_half(x: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->bik", x, x)  # an_einsum_in_half


@mechanism("std.correction", ONES[:1, 0])
def the_deviation_of_one(x: Tensor) -> Tensor:
    return x.std()  # the_deviation_of_one


@mechanism("mean.default", ONES)
def the_mean_of_nothing(x: Tensor) -> Tensor:
    kept = x[x > 1]
    return kept.mean()  # the_mean_of_nothing


@mechanism("acos.default", ONES * 2)
def an_angle(x: Tensor) -> Tensor:
    return x.acos()  # an_angle


@mechanism("atanh.default", ONES)
def an_inverse_tanh(x: Tensor) -> Tensor:
    return torch.atanh(x)  # an_inverse_tanh


@mechanism("log1p.default", -ONES)
def a_log_at_its_pole(x: Tensor) -> Tensor:
    return torch.log1p(x)  # a_log_at_its_pole


@mechanism("logit.default", ONES)
def a_logit_of_one(x: Tensor) -> Tensor:
    return torch.logit(x)  # a_logit_of_one


@mechanism("reciprocal.default", ONES * 0)
def a_reciprocal(x: Tensor) -> Tensor:
    return x.reciprocal()  # a_reciprocal


@mechanism("div.Tensor", ONES * 0)
def a_unit_vector_of_zero(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=0.0)  # a_unit_vector_of_zero


@mechanism("addcdiv.default", ONES)
def a_step_of_an_optimizer_by_hand(x: Tensor) -> Tensor:
    return torch.addcdiv(x, x, x * 0)  # a_step_of_an_optimizer_by_hand


@mechanism("expm1.default", ONES * 100, wide=FINITE)
def an_expm1(x: Tensor) -> Tensor:
    return torch.expm1(x)  # an_expm1


@mechanism("cosh.default", ONES * 100, wide=FINITE)
def a_log_cosh(x: Tensor) -> Tensor:
    return torch.log(torch.cosh(x))  # a_log_cosh


@mechanism("convolution.default", torch.full((1, 1, 4, 4), 300.0, dtype=torch.float16), wide=FINITE)
def a_convolution_in_half(x: Tensor) -> Tensor:
    return F.conv2d(x, x)  # a_convolution_in_half


@mechanism("lgamma.default", ONES * 0)
def a_log_gamma(x: Tensor) -> Tensor:
    return torch.lgamma(x)  # a_log_gamma


@mechanism("div.Tensor", ONES)
def in_a_comprehension(x: Tensor) -> Tensor:
    return torch.stack([row / (row - 1) for row in x])  # in_a_comprehension


@mechanism("exp.default", ONES * 100, wide=FINITE)
def in_a_call_of_several_lines(x: Tensor) -> Tensor:
    return torch.where(
        x > 0,
        torch.exp(x),  # in_a_call_of_several_lines
        x,
    )


@mechanism("linalg_inv_ex.default", torch.zeros(2, 2))
def an_inverse(x: Tensor) -> Any:
    inverse, _ = torch.linalg.inv_ex(x)  # an_inverse
    return inverse


@mechanism("mul.Tensor", ONES * 1e20, wide=FINITE)
def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        squares: Tensor = x * x  # without_gradients
    return squares


@mechanism("_scaled_dot_product_flash_attention_for_cpu.default", ONES[None, None] * 1e30, wide=FINITE)
def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)  # attention


@mechanism("div.Tensor", ONES)
def a_generator(x: Tensor) -> Tensor:
    def rows() -> Iterator[Tensor]:
        for row in x:
            yield row / 0  # a_generator

    return torch.stack(list(rows()))


@pytest.mark.parametrize("one", MECHANISMS, ids=str)
def test_operator_line_recurrence_and_precision(one: Mechanism) -> None:
    trip, found = tripped(nn.Sequential(Calls(one.call)) if len(one.given) == 1 else Calls(one.call), *one.given)
    operator = found.operator
    assert operator is not None
    assert operator.source is not None
    assert (operator.name, operator.source.line) == (one.operator, line_of(str(one)))
    assert Path(operator.source.file) == HERE
    assert operator.source.text.endswith(f"# {one}")
    assert trip.operator == operator
    assert (trip.recurs, found.recurred, found.of, found.note) == (True, 3, 3, "")
    wide = {row.dtype: row.state for row in found.precision}["float64"]
    assert (wide is State.FINITE) == (one.wide == FINITE)


# --- where the line is -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, eps=0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)  # a_linear
        return self.norm(hidden * 0)  # type: ignore[no-any-return]  # a_norm


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_a_module_of_torch_has_the_line_of_its_call(check: str) -> None:
    model = nn.Sequential(Block())
    with torch.no_grad():
        model.get_parameter("0.first.weight").fill_(1e38)
    trip, found = late(model, ONES * 1e3, check=check)
    assert trip.frame.spec.module == "0.first"
    assert found.operator is not None
    assert found.operator.source is not None
    assert (found.operator.name, found.operator.source.line) == ("aten.addmm.default", line_of("a_linear"))
    model = nn.Sequential(Block())
    trip, found = late(model, ONES, check=check)
    assert trip.frame.spec.module == "0.norm"
    assert found.operator is not None
    assert found.operator.source is not None
    assert found.operator.name == "aten.native_layer_norm.default"
    assert found.operator.source.text.startswith("return self.norm(hidden * 0)")


def late(model: nn.Module, *args: Any, check: str) -> tuple[Trip, CloseUp]:
    """A bad forward; with ``async`` it is judged when the next one begins."""
    _, notes = watched(model, check=check)
    with pytest.raises(OverflowDetected):
        _ = model(*args), model(*args)
    return the_only(notes)


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_the_call_of_the_model_is_the_line_where_it_has_no_code_of_the_users(check: str) -> None:
    model = nn.Sequential(nn.LayerNorm(4, eps=0.0))
    _, notes = watched(model, check=check)
    with pytest.raises(OverflowDetected):
        _ = [model(ONES) for _ in range(2)]  # the_model
    _, found = the_only(notes)
    assert found.operator is not None
    assert found.operator.source is not None
    assert found.operator.source.line == line_of("the_model")


@dataclass
class Given:
    x: Tensor
    y: Tensor


class OfGiven(nn.Module):
    def forward(self, *, given: Given, scale: float) -> Tensor:
        return given.x * scale / given.y  # of_given


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_keyword_and_dataclass_inputs(check: str) -> None:
    model = OfGiven()
    _, notes = watched(model, check=check)
    with pytest.raises(OverflowDetected):
        _ = [model(given=Given(ONES, ONES * 0), scale=2.0) for _ in range(2)]
    _, found = the_only(notes)
    assert found.operator is not None
    assert found.operator.source is not None
    assert (found.operator.name, found.operator.source.line) == ("aten.div.Tensor", line_of("of_given"))
    assert found.operator.shapes == ((2, 4), (2, 4))
    assert found.recurred == 3


@pytest.mark.parametrize("check", ["frame", "batch"])
def test_what_was_born_between_modules_is_found_in_the_forward_around_them(check: str) -> None:
    model = Root(lambda self, x: self.body(x / (x - 1)), body=nn.Linear(4, 4))  # between
    trip, found = tripped(model, ONES, watch={"check": check})
    assert (trip.frame.spec.module, trip.operator) == ("body", None)  # the module's own operators are not to blame
    assert classify(trip)[0] is Cause.UPSTREAM
    assert found.operator is not None
    assert found.operator.source is not None
    assert (found.operator.name, found.operator.source.line) == ("aten.div.Tensor", line_of("between"))
    assert found.recurred == 3


def test_the_module_in_which_the_operator_ran_is_named_where_only_the_root_was_measured() -> None:
    model = nn.Sequential(Calls(lambda x: x), nn.Sequential(Calls(lambda x: x / 0)))
    _, notes = watched(model, every=2, first_batch=1)
    with pytest.raises(OverflowDetected):
        model(ONES)
    trip, found = the_only(notes)
    assert trip.frame.spec.module == ""
    assert found.operator is not None
    assert found.operator.module == "1.0"


def test_a_marked_tensor_is_found_in_the_forward_around_it() -> None:
    model = Root(lambda self, x: rankwatch.detect_overflow(self.body(x).log() * 0, "scores") or x, body=nn.ReLU())  # marked
    with rankwatch.watch(model) as watch:
        with pytest.raises(OverflowDetected):
            model(-ONES)
        found = watch._closeup
    assert found is not None
    assert found.operator is not None
    assert found.operator.source is not None
    assert (found.operator.name, found.operator.source.line, found.recurred) == ("aten.log.default", line_of("marked"), 3)


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


class DrawsRarely(nn.Module):
    """An inf for one number in a thousand."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.rand(()) < 0.001, x / 0, x)


def test_a_rare_draw_recurs_as_the_root_was_entered_with_it() -> None:
    model = nn.Sequential(nn.Dropout(0.5), DrawsRarely())
    _, notes = watched(model)

    def train() -> None:
        for number in range(100_000):
            torch.manual_seed(number)
            model(ONES)

    with pytest.raises(OverflowDetected):
        train()
    _, found = the_only(notes)
    assert (found.recurred, found.of, found.note) == (3, 3, "")


def test_other_random_numbers_make_it_unknown_whether_it_recurs() -> None:
    model = Calls(lambda x: x / 0 if random.random() < 0.002 or np.random.rand() < 0.002 else x * 1)
    random.seed(0)
    np.random.seed(0)
    _, notes = watched(model)
    with pytest.raises(OverflowDetected):
        _ = [model(ONES) for _ in range(100_000)]
    trip, found = the_only(notes)
    assert (trip.recurs, found.recurred, found.of) == (None, 0, 0)
    assert "it draws random numbers, and drew others" in found.note


class CountsToThree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / 0 if self.calls == 3 else x


def test_an_attribute_that_a_forward_changes_makes_it_unknown_whether_it_recurs() -> None:
    model = CountsToThree()
    _, notes = watched(model)
    with pytest.raises(OverflowDetected):
        _ = model(ONES), model(ONES), model(ONES)
    trip, found = the_only(notes)
    assert (trip.recurs, found.of, model.calls) == (None, 0, 3)
    assert "it changes calls of its own" in found.note
    assert classify(trip)[0] is not Cause.UNEXPLAINED


# --- in which precision? -----------------------------------------------------------------------------------------------


def test_the_largest_number_of_the_wide_output() -> None:
    _, found = tripped(Calls(lambda x: (x @ x.t()).clamp(min=1)), HALVES)
    assert [(row.dtype, row.state, row.abs_max) for row in found.precision] == [
        ("float32", State.FINITE, 360000.0),
        ("float64", State.FINITE, 360000.0),
    ]


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


class Everything(nn.Module):
    """Its forward changes all that a forward may: buffers, attributes, random states; and has a place for a fault."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0
        self.seen: list[int] = []
        self.cache: dict[str, Tensor] = {}
        self.fault = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["last"] = x
        self.steps += 1
        drawn = random.random() + float(np.random.rand())
        hidden = checkpoint(self.inner, x, use_reentrant=False) * drawn
        hidden = self.drop(self.norm(hidden))
        if self.fault:
            return torch.log(hidden * 0)
        return hidden  # type: ignore[no-any-return]


def after_training(options: dict[str, Any] | None) -> list[Any]:
    """All state after three batches, in the second of which a watched model trips."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


@pytest.mark.parametrize("options", [{}, {"check": "batch"}, {"gradients": True}, {"closeup": 0}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_training_that_goes_on_is_bitwise_as_without_a_watch(options: dict[str, Any]) -> None:
    if options.get("closeup") == 0:
        _, notes = watched(model := Calls(lambda x: x / 0), **options)
        with pytest.raises(OverflowDetected):
            model(ONES)
        assert (notes.closeups, notes.trips[0].has_closeup) == ([], False)
        assert notes.trips[0].operator is not None  # which is as quick as before
        return
    for one, other in zip(after_training(None), after_training(options), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_the_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("rankwatch.rerun.closeup.time.monotonic", lambda: clock[0])

    def slow(x: Tensor) -> Tensor:
        clock[0] += 0.9
        return x / 0

    _, found = tripped(Calls(slow), ONES)
    assert (found.recurred, found.of, found.precision) == (3, 3, ())
    assert found.note == "no time for more: one forward takes 0.9 s"


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
