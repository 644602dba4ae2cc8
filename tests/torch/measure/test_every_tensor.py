"""For any tensor the watched forward continues; the numbers are right, or the state says that there are none."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.masked import masked_tensor

from notebook import Notebook, model_of, ones, unwatch, watched
from rankwatch.errors import OverflowDetected
from rankwatch.measure.modules import named_modules
from rankwatch.measure.tape import Cell
from rankwatch.measure.weights import Weights
from rankwatch.shared.types.frame import Position, Reading, State

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Echo(nn.Module):
    """Returns its input."""

    def forward(self, value: Any) -> Any:
        return value


class Around(nn.Module):
    """Passes its input to ``inner``, and drops the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Echo()

    def forward(self, value: Any) -> None:
        self.inner(value)


def readings(value: Any, **options: Any) -> list[Reading]:
    """The readings of ``value`` in a watched module's frame, as input and as output."""
    detector, notebook = watched(model := Around(), **options)
    model(value)
    assert detector.fault == ""
    inner, _ = notebook.frames()
    assert [reading.label for reading in inner.readings] == ["input[0]", "output"]
    return list(inner.readings)


def check(value: Tensor, state: State, abs_min: float = 0.0, abs_max: float = 0.0) -> None:
    dtype = str(value.dtype).removeprefix("torch.")
    expected = [(dtype, abs_min, abs_max, state)] * 2
    assert [(r.dtype, r.abs_min, r.abs_max, r.state) for r in readings(value)] == expected


def culprit(value: Any) -> State:
    _, notebook = watched(model := Around())
    trip = notebook.trip_of(model, value)
    assert (trip.frame.spec.module, trip.culprit.label) == ("inner", "output")
    return trip.culprit.state


def dtypes(*names: str) -> list[torch.dtype]:
    """The named dtypes that this version of torch has."""
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


FLOATS = dtypes("float64", "float32", "float16", "bfloat16")
COMPLEX = dtypes("complex128", "complex64", "complex32")
FLOAT8 = dtypes("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTEGERS = dtypes("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
PLACEHOLDERS = dtypes("float4_e2m1fn_x2", "bits8", "int4", "uint4")
"""Dtypes that name bits, and that torch cannot compute with."""

# --- dtypes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8], ids=str)
def test_every_floating_dtype_is_measured(dtype: torch.dtype) -> None:
    check(torch.tensor([4.0, 0.5, 2.0]).to(dtype), State.FINITE, 0.5, 4.0)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers_are_measured_by_their_magnitude(dtype: torch.dtype) -> None:
    check(torch.tensor([3 + 4j, -1j]).to(dtype), State.FINITE, 1.0, 5.0)


@pytest.mark.parametrize(("dtype", "part"), [(torch.complex64, 3e38), (torch.complex32, 6e4)], ids=str)
def test_a_finite_complex_number_whose_magnitude_is_beyond_its_dtype_does_not_trip(dtype: torch.dtype, part: float) -> None:
    value = torch.tensor([complex(part, part)], dtype=torch.complex128).to(dtype)
    assert torch.view_as_real(value).isfinite().all()
    assert {reading.state for reading in readings(value)} == {State.FINITE}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_measured_to_their_ends_and_never_trip(dtype: torch.dtype) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    for reading in readings(torch.tensor([low, high], dtype=dtype), policy="strict"):
        assert reading.state is State.NOT_FLOAT
        assert (reading.abs_min, reading.abs_max) == pytest.approx((min(-low, high), max(-low, high)))


def test_booleans_are_measured_and_never_trip() -> None:
    check(torch.tensor([True, False]), State.NOT_FLOAT, 0.0, 1.0)


@pytest.mark.parametrize("dtype", PLACEHOLDERS, ids=str)
def test_a_dtype_that_torch_cannot_compute_with_says_so(dtype: torch.dtype) -> None:
    check(torch.empty(3, dtype=dtype), State.UNMATERIALISED)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, torch.float8_e5m2], ids=str)
def test_an_inf_trips_in_every_dtype_that_has_one(dtype: torch.dtype) -> None:
    assert culprit(torch.tensor([1.0, -math.inf]).to(dtype)) is State.INF


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *FLOAT8], ids=str)
def test_a_nan_trips_in_every_floating_dtype(dtype: torch.dtype) -> None:
    assert culprit(torch.tensor([1.0, math.nan]).to(dtype)) is State.NAN


def test_a_number_that_needs_float64_survives_its_summary() -> None:
    detector, notebook = watched(model := Around())
    model((ones(), torch.tensor([1e300, -1e-300], dtype=torch.float64), ones().half() * 2))
    assert detector.fault == ""
    outputs = [(r.dtype, r.abs_min, r.abs_max) for r in notebook.frames()[0].readings if r.label.startswith("output")]
    assert outputs == [("float32", 1.0, 1.0), ("float64", 1e-300, 1e300), ("float16", 2.0, 2.0)]


# --- layouts --------------------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[1.0, -5.0, 9.0], [2.0, 3.0, 9.0]])


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *FLOAT8, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.t()[:2], id="transposed"),
        pytest.param(lambda x: x[:, ::2], id="strided"),
        pytest.param(lambda x: x[0, 1:2].expand(3, 4), id="expanded"),
        pytest.param(lambda x: x[1, 1], id="0-dim"),
        pytest.param(lambda x: x.unsqueeze(0).transpose(0, 2)[1:], id="permuted"),
    ],
)
def test_a_view_is_measured_without_what_it_leaves_out(view: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    values = view(ROWS.abs().to(dtype))
    plain = [abs(value) for value in values.to(torch.complex128).flatten().tolist()]
    is_float = dtype.is_floating_point or dtype.is_complex
    check(values, State.FINITE if is_float else State.NOT_FLOAT, min(plain), max(plain))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *FLOAT8, *INTEGERS, torch.bool, *PLACEHOLDERS], ids=str)
def test_an_empty_tensor_is_empty(dtype: torch.dtype) -> None:
    check(torch.empty((0, 3), dtype=dtype), State.EMPTY)


def test_lazily_conjugated_and_negated_tensors_are_measured() -> None:
    conjugated = torch.tensor([3 + 4j, 2j]).conj()
    assert conjugated.is_conj()
    assert conjugated.imag.is_neg()
    check(conjugated, State.FINITE, 2.0, 5.0)
    check(conjugated.imag, State.FINITE, 2.0, 4.0)


def test_an_inf_in_a_lazily_negated_tensor_trips() -> None:
    assert culprit(torch.tensor([1 + 1j, complex(1, math.inf)]).conj().imag) is State.INF


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.ones(3, device="meta"), id="meta"),
        pytest.param(lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), id="masked"),
        pytest.param(lambda: torch.ones(2).to_mkldnn(), id="mkldnn"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), id="quantised"),
        pytest.param(
            lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
            id="quantised-by-channel",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quant.*:UserWarning", "ignore:.*quant.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_layout_that_cannot_be_measured_says_so(make: Callable[[], Tensor]) -> None:
    check(make(), State.UNMATERIALISED)


def jagged_with_lengths(rows: Tensor) -> Tensor:
    """The first row whole, and two numbers of the second: what follows them is in its memory, and not in the tensor."""
    return torch.nested.narrow(rows, 1, torch.tensor([0, 0]), torch.tensor([3, 2]), layout=torch.jagged)


STORED_APART = [
    pytest.param(lambda rows: rows.to_sparse(), id="coo"),
    pytest.param(lambda rows: rows.to_sparse_csr(), id="csr"),
    pytest.param(lambda rows: rows.to_sparse_csc(), id="csc"),
    pytest.param(lambda rows: rows.to_sparse_bsr((1, 1)), id="bsr"),
    pytest.param(lambda rows: torch.nested.nested_tensor([rows[0], rows[1, :2]]), id="nested"),
    pytest.param(lambda rows: torch.nested.nested_tensor([rows[0], rows[1, :2]], layout=torch.jagged), id="jagged"),
    pytest.param(jagged_with_lengths, id="jagged-with-lengths"),
]
beta = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta", "ignore:The PyTorch API of nested tensors")


@beta
@pytest.mark.parametrize("make", STORED_APART)
def test_the_values_of_a_nested_or_sparse_tensor_are_measured(make: Callable[[Tensor], Tensor]) -> None:
    check(make(torch.tensor([[1.0, -5.0, 2.0], [3.0, 0.5, 0.0]])), State.FINITE, 0.5, 5.0)


@beta
@pytest.mark.parametrize("make", STORED_APART)
def test_a_nan_in_a_nested_or_sparse_tensor_trips(make: Callable[[Tensor], Tensor]) -> None:
    assert culprit(make(torch.tensor([[1.0, -5.0, 2.0], [3.0, math.nan, 0.0]]))) is State.NAN


@beta
def test_memory_that_is_no_part_of_a_jagged_tensor_does_not_trip() -> None:
    check(jagged_with_lengths(torch.tensor([[1.0, 2.0, 4.0], [3.0, 2.0, math.nan]])), State.FINITE, 1.0, 4.0)


@pytest.mark.parametrize("when", ["frame", "batch", "async"])
def test_a_tensor_that_cannot_be_measured_hides_no_other(when: str) -> None:
    detector, notebook = watched(model := Around(), check=when)
    bad = [torch.ones(3, device="meta"), torch.ones(2).to_mkldnn(), torch.tensor([math.nan])]
    if when != "async":
        with pytest.raises(OverflowDetected):
            model(bad)
    else:
        model(bad)
        detector.remove()  # judges the pending numbers, and no longer raises
    ((position, _),) = notebook.found
    assert position == Position(0, 0, 0)
    assert notebook.trips[0].culprit.label == "output[2]"


def test_a_model_whose_weights_are_on_the_meta_device_runs() -> None:
    model = model_of(nn.Linear(4, 4, device="meta"), nn.GELU())
    detector, notebook = watched(model)
    model(torch.empty(3, 4, device="meta")).sum().backward()
    assert detector.fault == ""
    assert {r.state for frame in notebook.frames() for r in frame.readings} == {State.UNMATERIALISED}


# --- sharded --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    unwatch()
    dist.destroy_process_group()


@pytest.fixture
def _first_of_two_ranks() -> Iterator[None]:
    """The other rank does not exist: its shard of a tensor cannot be read."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_first_of_two_ranks")
def test_only_this_ranks_shard_of_a_distributed_tensor_is_measured() -> None:
    public = hasattr(importlib.import_module("torch.distributed.tensor"), "DTensor")  # since torch 2.5
    tensor = importlib.import_module("torch.distributed.tensor" if public else "torch.distributed._tensor")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    whole = tensor.DTensor.from_local(torch.tensor([[0.5, -4.0]]), mesh, [tensor.Shard(0)], run_check=False)
    assert whole.shape == (2, 2)
    check(whole, State.FINITE, 0.5, 4.0)


@pytest.mark.usefixtures("_first_of_two_ranks")
def test_the_label_of_a_sharded_parameter_says_so() -> None:
    distributed = importlib.import_module("torch.distributed.tensor")
    if not hasattr(distributed, "distribute_tensor"):
        pytest.skip("torch.distributed.tensor is public since torch 2.5")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = model_of(nn.LayerNorm(4))
    for name, placement in (("weight", distributed.Shard(0)), ("bias", distributed.Replicate())):
        tensor = distributed.DTensor.from_local(torch.ones(4), mesh, [placement], run_check=False)
        setattr(model[0], name, nn.Parameter(tensor, requires_grad=False))
    named = named_modules(model)[id(model[0])]
    rows = Weights(lambda value: Cell(), 0).measure(named, 0, 0).rows
    assert [row.label for row in rows] == ["weight (shard of 2)", "bias"]


def test_memory_that_one_storage_gave_back_to_another_is_measured_anew() -> None:
    """FSDP reuses memory in this way for the weights of one unit after another."""
    memory = bytearray(16)
    model = model_of(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))

    def move_in(at: int, value: float) -> None:
        memory[:] = torch.full((4,), value).numpy().tobytes()
        model[at].weight.data = torch.frombuffer(memory, dtype=torch.float32).view(2, 2)

    for at, value in enumerate((2.0, 3.0)):
        model[at].register_forward_pre_hook(lambda module, given, at=at, value=value: move_in(at, value))
    detector, notebook = watched(model)
    model(torch.ones(1, 2))
    assert detector.fault == ""
    assert [frame.readings[0].abs_max for frame in notebook.frames()[:2]] == [2.0, 3.0]


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("is_watched_first", [True, False])
def test_a_fully_sharded_model_is_watched_under_its_own_names(is_watched_first: bool) -> None:
    fully_shard = getattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard", None)
    if fully_shard is None:
        pytest.skip("torch.distributed.fsdp.fully_shard came with torch 2.6")
    model = model_of(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    before = {name: value.detach().abs().max().item() for name, value in model.named_parameters()}
    seen: tuple[Any, Notebook] | None = watched(model) if is_watched_first else None
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    detector, notebook = seen or watched(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(ones()).sum().backward()
        optimizer.step()
    assert detector.fault == ""
    assert [(s.batch, s.optimizer_step) for _, s in notebook.batches] == [(0, 0), (1, 1)]
    *frames, loss = notebook.frames(0)
    assert [(f.spec.module, f.spec.module_class) for f in frames] == [
        ("0", "Linear"), ("1", "GELU"), ("2", "Linear"), ("", "Sequential"),
    ]  # fmt: skip
    assert [r.label for r in loss.readings] == ["loss"]
    assert {r.state for frame in (*frames, loss) for r in frame.readings} == {State.FINITE}
    weights = {f"{f.spec.module}.{r.label}": r.abs_max for f in frames for r in f.readings if r.label in ("weight", "bias")}
    assert weights == pytest.approx(before)
    with torch.no_grad():
        next(model[2].parameters()).to_local().fill_(math.nan)
    trip = notebook.trip_of(model, ones())
    assert (trip.frame.spec.module, trip.culprit.label) == ("2", "weight")
