"""Notices: underflow, gradients that become zero, and outputs that approach their dtype's largest number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from notebook import Gain, learn, model_of, ones, sgd, watched, watching
from rankwatch.judge.batch import EVERY, BatchInProgress, BatchPart, BatchState
from rankwatch.judge.health import HORIZON, LOOKS, NEAR, Health
from rankwatch.measure.modules import NamedModule
from rankwatch.measure.recorder import PendingFrame
from rankwatch.measure.tape import Cell
from rankwatch.shared.types.frame import DTYPE_MAX, DTYPE_TINY, FrameSpec, Kind, Phase, Position, ReadingSpec
from rankwatch.shared.types.notice import Notice, NoticeKind, describe_notice
from trainings.parts import Root

LIMIT = DTYPE_MAX["float16"]
TINY = DTYPE_TINY["float16"]
OUTPUT = ReadingSpec(Kind.OUTPUT, "output", "float16")
ZEROS = ReadingSpec(Kind.GRADIENT, "weight.grad zeros", "float16")

Row = tuple[str, ReadingSpec, float]
"""A module's name, a reading of it, and its abs max."""


def part_of(batch: int, rows: Sequence[Row], phase: Phase = Phase.FORWARD) -> BatchPart:
    """A part of a batch with all numbers read, one frame for each row."""
    part = BatchInProgress(Position(batch, 0, 0), batch, state=BatchState.BATCH).part
    for frame, (module, reading, high) in enumerate(rows):
        cell = Cell()
        cell.fill(high if math.isnan(high) else 0.0, high)
        spec = FrameSpec(module, "Linear", (reading,), phase=phase)
        part.frames.append(
            PendingFrame(Position(batch, 0, frame), NamedModule(nn.Identity(), [module]), spec, [cell], batch)
        )
    return part


def looked(batch: int, *rows: Row, health: Health | None = None, phase: Phase = Phase.FORWARD) -> list[Notice]:
    return (health or Health()).look(part_of(batch, rows, phase))


def followed(reading: ReadingSpec, values: dict[int, float]) -> list[list[Notice]]:
    """The notices for a reading with these values, by batch."""
    health = Health()
    return [looked(batch, ("layer", reading, value), health=health) for batch, value in values.items()]


@pytest.mark.parametrize("every", [1, 8, 16, 64])
def test_growth_is_by_the_batch_however_few_are_measured(every: int) -> None:
    """It doubles in 50 batches, from a 512th of its dtype's end on."""
    values = {batch: LIMIT / 512 * 2 ** (batch / 50) for batch in range(0, 321, every)}
    (last,) = followed(OUTPUT, values)[-1]
    assert last.growth == pytest.approx(1 / 50)
    assert last.batches_left == pytest.approx(450 - last.batch, abs=1)


# --- when it looks --------------------------------------------------------------------------------------------------------


def test_the_first_batches_and_then_every_eighth_are_checked() -> None:
    health = Health()
    noticed = [batch for batch in range(40) if looked(batch, ("layer", OUTPUT, LIMIT / 2), health=health)]
    assert noticed == [*range(EVERY), 8, 16, 24, 32]


def test_a_recomputed_frame_says_nothing_new() -> None:
    near = ("layer", OUTPUT, LIMIT / 2)
    assert looked(0, near, phase=Phase.RECOMPUTE) == []
    assert len(looked(0, near, phase=Phase.FORWARD)) == 1


@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.KEYWORD])
def test_only_outputs_and_gradients_are_checked(kind: Kind) -> None:
    assert looked(0, ("layer", ReadingSpec(kind, "x", "float16"), TINY / 2)) == []
    assert looked(0, ("layer", ReadingSpec(kind, "x", "float16"), LIMIT / 2)) == []


@pytest.mark.parametrize("high", [math.inf, math.nan, 0.0])
def test_readings_that_are_not_finite_or_all_zero_are_not_noticed(high: float) -> None:
    for kind in (Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRADIENT):
        assert looked(0, ("layer", ReadingSpec(kind, "x", "float16"), high)) == []


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64", ""])
def test_a_dtype_without_a_known_range_is_not_noticed(dtype: str) -> None:
    assert looked(0, ("layer", ReadingSpec(Kind.OUTPUT, "output", dtype), 1e-40)) == []


def test_it_remembers_readings_and_not_batches() -> None:
    health = Health()
    rows = [(f"layer.{layer}", OUTPUT, value) for layer in range(5) for value in (1.0, TINY / 2)]
    for batch in range(200):
        looked(batch, *rows, health=health)
    assert len(health._past) == 10  # five modules, each with headroom and underflow


# --- underflow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_TINY)
@pytest.mark.parametrize("kind", [Kind.OUTPUT, Kind.MARKED, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.GRADIENT])
def test_values_under_the_smallest_normal_number_are_underflow(kind: Kind, dtype: str) -> None:
    reading = ReadingSpec(kind, "x", dtype)
    tiny = DTYPE_TINY[dtype]
    (notice,) = looked(3, ("layer", reading, tiny / 2))
    assert notice == Notice(NoticeKind.UNDERFLOW, "layer", "Linear", "x", dtype, 3, 3, tiny / 2, 0.0)
    assert looked(3, ("layer", reading, tiny)) == []


@pytest.mark.parametrize("dtype", DTYPE_TINY)
def test_the_smallest_normal_numbers_are_torchs(dtype: str) -> None:
    info = torch.finfo(getattr(torch, dtype))
    assert (DTYPE_TINY[dtype], DTYPE_MAX[dtype]) == (info.smallest_normal, info.max)


def test_underflow_says_since_when() -> None:
    noticed = followed(OUTPUT, {0: 1.0, 1: TINY / 2, 2: 1.0, 3: TINY / 4})
    assert [[(notice.since, notice.batch) for notice in notices] for notices in noticed] == [[], [(1, 1)], [], [(1, 3)]]


# --- headroom -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_output_near_its_largest_number_is_noticed_with_or_without_growth(dtype: str) -> None:
    reading, most = ReadingSpec(Kind.OUTPUT, "output", dtype), DTYPE_MAX[dtype]
    assert looked(0, ("layer", reading, 0.99 * NEAR * most)) == []
    (notice,) = looked(0, ("layer", reading, 1.01 * NEAR * most))
    assert (notice.kind, notice.since, notice.growth, notice.batches_left) == (NoticeKind.HEADROOM, 0, 0.0, math.inf)


def test_an_output_that_stays_near_its_limit_is_described_without_growth() -> None:
    *_, (notice,) = followed(OUTPUT, dict.fromkeys(range(6), 32752.0))
    assert describe_notice(notice) == (
        "next to overflow: layer (Linear), output: abs max 32,800 in batch 5 is 50% of float16's largest number "
        "and does not grow"
    )


def test_gradients_near_their_limit_are_the_loss_scalers_business() -> None:
    assert looked(0, ("layer", ReadingSpec(Kind.GRAD_INPUT, "grad_input[0]", "float16"), LIMIT / 2)) == []


def test_growth_is_believed_after_some_looks_in_a_row() -> None:
    noticed = followed(OUTPUT, {batch: 256 * 2.0**batch for batch in range(7)})
    assert [len(notices) for notices in noticed] == [0] * LOOKS + [1] * (7 - LOOKS)
    (notice,) = noticed[6]
    assert (notice.since, notice.batch, notice.value, notice.growth) == (LOOKS, 6, 2.0**14, 1.0)
    assert notice.batches_left == pytest.approx(2.0, abs=0.001)
    assert describe_notice(notice).endswith("and grows by x2 a batch: about 2 batches are left")


def test_a_young_training_that_grows_everywhere_is_not_noticed() -> None:
    assert not any(followed(OUTPUT, {batch: 1.9**batch for batch in range(8)}))


def test_growth_that_breaks_off_is_not_growth() -> None:
    assert followed(OUTPUT, {0: 1.0, 1: 2.0, 2: 4.0, 3: 3.0, 4: 6.0, 5: 12.0}) == [[]] * 6


def test_growth_is_measured_by_batch_also_between_the_later_looks() -> None:
    *_, (notice,) = followed(OUTPUT, {batch: 256 * 2.0 ** (batch / 8) for batch in range(0, 48, 8)})
    assert notice.growth == pytest.approx(1 / 8)


def test_growth_that_needs_very_long_is_not_noticed() -> None:
    # From 256 to the largest number in 8 doublings.
    slow, fast = 8 / (2 * HORIZON), 8 / (HORIZON / 2)
    assert not any(followed(OUTPUT, {batch: 256 * 2 ** (slow * batch) for batch in range(8)}))
    assert followed(OUTPUT, {batch: 256 * 2 ** (fast * batch) for batch in range(8)})[-1]


def test_an_output_that_came_back_is_noticed_anew() -> None:
    noticed = followed(OUTPUT, {0: LIMIT / 2, 1: 1.0, 2: LIMIT / 2, 3: LIMIT / 2})
    assert [[notice.since for notice in notices] for notices in noticed] == [[0], [], [2], [2]]


def test_the_module_that_overflows_next_is_the_most_urgent() -> None:
    health = Health()
    for batch in range(6):
        noticed = looked(
            batch,
            ("still", OUTPUT, LIMIT / 2),
            ("slow", OUTPUT, 300 * 1.2**batch),
            ("next", OUTPUT, 30.0 * 4**batch),
            ("lost", OUTPUT, TINY / 2),
            health=health,
        )
    assert [notice.module for notice in sorted(noticed, key=lambda one: one.urgency)] == ["next", "slow", "still", "lost"]


def test_the_largest_output_of_a_modules_calls_counts() -> None:
    health = Health()
    for batch in range(5):
        # The largest output grows; the smaller output before it jumps up and down.
        calls = [("layer", OUTPUT, value) for value in (1.0 + batch % 2, 100 * 1.5**batch, 3.0)]
        noticed = looked(batch, *calls, health=health)
    assert [(notice.since, notice.value, round(2**notice.growth, 3)) for notice in noticed] == [(3, 506.25, 1.5)]


def test_a_module_that_is_called_more_and_more_often_does_not_grow() -> None:
    health = Health()
    for batch in range(8):
        assert looked(batch, *[("layer", OUTPUT, 100.0)] * (batch + 1), health=health) == []


@pytest.mark.parametrize("start", [1.0, 1e-3, 5e3])
def test_no_forecast_comes_from_one_jump(start: float) -> None:
    """Of many looks that creep upwards, one jumps by half of the way to the end."""
    jump = 0.4 * LIMIT / start
    values = {batch: start * 1.001**batch * (jump if batch >= 5 else 1.0) for batch in range(8)}
    for notices in followed(OUTPUT, values):
        assert all(notice.batches_left > 100 for notice in notices)


@pytest.mark.parametrize(
    ("dtype", "first", "last", "is_told"),
    [
        ("bfloat16", 0.7, 1.9e4, True),
        ("bfloat16", 0.7, 900.0, False),
        ("bfloat16", 1e-4, 10.0, False),  # a layer that began at next to nothing
        ("bfloat16", 1e5, 1e8, False),
        ("float32", 0.7, 1.9e4, False),
    ],
)
def test_an_output_in_bfloat16_that_has_grown_thousands_of_times_is_told(
    dtype: str, first: float, last: float, is_told: bool
) -> None:
    values = dict.fromkeys(range(4), first) | dict.fromkeys(range(8, 40, 8), last)
    found = [notice for notices in followed(ReadingSpec(Kind.OUTPUT, "output", dtype), values) for notice in notices]
    assert {notice.kind for notice in found} == ({NoticeKind.GROWN} if is_told else set())
    assert not is_told or "abs max 19,000 in batch 32 is x27,100 the largest of its first" in describe_notice(found[-1])


# --- zeros ----------------------------------------------------------------------------------------------------------------


def test_a_growing_share_of_zeros_is_noticed() -> None:
    noticed = followed(ZEROS, {0: 0.05, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.5})
    assert [len(notices) for notices in noticed] == [0, 0, 0, 1, 1]
    (notice,) = noticed[-1]
    assert (notice.kind, notice.module, notice.label) == (NoticeKind.ZEROS, "layer", "weight.grad")
    assert (notice.since, notice.batch, notice.value) == (1, 4, 0.5)
    assert notice.growth == pytest.approx(0.2)
    assert describe_notice(notice) == (
        "underflow: layer (Linear), weight.grad: 50% of the elements are zero in batch 4, a share that grows since batch 1"
    )


@pytest.mark.parametrize(
    "shares",
    [
        [0.5, 0.5, 0.5, 0.5, 0.5],  # a ReLU's
        [0.5, 0.51, 0.52, 0.53, 0.54],  # too little
        [0.01, 0.02, 0.04, 0.06, 0.08],  # too few
        [0.1, 0.3, 0.2, 0.4, 0.3],  # up and down
    ],
)
def test_a_share_of_zeros_that_does_not_grow_is_not_noticed(shares: list[float]) -> None:
    assert not any(followed(ZEROS, dict(enumerate(shares))))


def test_a_share_of_zeros_is_no_underflow() -> None:
    assert looked(0, ("layer", ZEROS, TINY / 2)) == []


# --- in a training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["frame", "batch", "async"])
def test_a_training_that_nears_overflow_is_noticed_before_it_overflows(check: str) -> None:
    model = model_of(Gain(), Gain(), Gain()).half()
    detector, notebook = watched(model, check=check)
    for batch in range(12):
        model[1].gain = 32 * 2.0 ** min(batch, 10)
        model(ones().half())
    detector.remove()
    assert notebook.trips == []
    last = {notice.key: notice for notice in notebook.notices}
    # The module after it and the root hand the same numbers on.
    assert {(notice.kind, notice.module) for notice in last.values()} == {(NoticeKind.HEADROOM, "1")}
    assert {notice.batch for notice in notebook.notices} == {3, 4, 5, 6, 7, 8}


def test_activations_and_gradients_that_underflow_are_noticed() -> None:
    model = model_of(Gain(2.0**-16), Gain()).half()
    detector, notebook = watched(model, gradients=True)
    model(ones().half().requires_grad_() * 1).sum().backward()
    detector.remove()
    found = {(notice.kind, notice.module, notice.label) for notice in notebook.notices}
    assert found == {(NoticeKind.UNDERFLOW, "0", label) for label in ("output", "grad_input[0]")}


def test_an_eval_forward_is_not_looked_at() -> None:
    model = model_of(Gain(2.0**-16)).half()
    detector, notebook = watched(model)
    model.eval()(ones().half())
    detector.remove()
    assert notebook.notices == []


def test_a_growing_share_of_zeros_in_a_gradient_is_noticed() -> None:
    model, detector, notebook = watching(nn.Linear(4, 8, bias=False), gradients=True)
    for batch in range(6):
        model.zero_grad()
        used = torch.zeros(8)
        used[: 8 - batch] = 1.0
        (model(ones()) * used).sum().backward()
    detector.remove()
    shares = [
        reading.abs_max
        for table, summary in notebook.batches
        for frame in summary.frames(table)
        for reading in frame.readings
        if reading.label == "weight.grad zeros"
    ]
    assert shares == pytest.approx([batch / 8 for batch in range(6)])
    told = [(notice.kind, notice.module, notice.label, notice.since, notice.batch) for notice in notebook.notices]
    assert told == [(NoticeKind.ZEROS, "0", "weight.grad", 1, batch) for batch in (3, 4, 5)]


def trained(model: nn.Module, batches: int, x: torch.Tensor, **options: int) -> list[Notice]:
    _, notes = watched(model, **options)
    optimizer = sgd(model, 1e-3)
    for batch in range(batches):
        learn(model(x * (1e25 if batch == 4 else 1.0)).sum(), optimizer)
    return [notice for notice in notes.notices if notice.kind is NoticeKind.BUFFER]


def test_running_statistics_that_turn_bad_for_good_are_told_once() -> None:
    (notice,) = trained(model_of(nn.BatchNorm1d(4)), 40, torch.randn(3, 4), weights_every=2)
    assert (notice.module, notice.label) == ("0", "running_var")
    assert 4 <= notice.since <= 6
    text = describe_notice(notice)
    assert text.startswith(f"a bad buffer: 0 (BatchNorm1d), running_var: inf or nan since batch {notice.since}; ")


def test_a_mask_and_a_buffer_that_recovers_are_not_told() -> None:
    """It has a mask of -inf from the start, and a buffer that is bad in every third batch."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        self.calls += 1
        self.scratch.fill_(0.0 if self.calls % 3 else math.inf)
        return x * self.weight

    model = Root(forward, weight=nn.Parameter(torch.ones(4)), calls=0)
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    model.register_buffer("scratch", torch.zeros(1))
    assert trained(model, 40, torch.ones(3, 4), weights_every=1) == []


def test_a_buffer_that_nobody_initialised_is_told_once() -> None:
    """Memory that happens to be nan, and that this batch does not read."""
    model = Root(lambda self, x: x * self.weight, weight=nn.Parameter(torch.ones(4)))
    model.register_buffer("scale", torch.full((4,), math.nan), persistent=False)
    (notice,) = trained(model, 40, torch.ones(3, 4), weights_every=1)
    assert describe_notice(notice) == (
        "a bad buffer: (root) (Root), scale: inf or nan since batch 0; it never was finite: nobody has initialised it "
        "(torch.empty, to_empty), or a checkpoint has it so"
    )
