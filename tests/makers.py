"""Small, valid values of the data types, for tests to vary."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.calls import CollectiveCall, GroupCount
from rankwatch.shared.types.closeup import CloseUp, Precision
from rankwatch.shared.types.fingerprint import ALL_ROWS, Fingerprint, FingerprintRow, FingerprintTable, RankMesh
from rankwatch.shared.types.frame import (
    NO_STAGE,
    BatchSummary,
    Frame,
    FrameSpec,
    FrameTable,
    Kind,
    Moment,
    Phase,
    Position,
    Reading,
    ReadingSpec,
    State,
    pack,
    state_of,
)
from rankwatch.shared.types.gpu import Gpu
from rankwatch.shared.types.notice import Notice, NoticeKind
from rankwatch.shared.types.trip import BadWeight, LeftOut, Operator, Source, Trip

INF, NAN = float("inf"), float("nan")

_KINDS = {
    "input": Kind.INPUT,
    "output": Kind.OUTPUT,
    "grad_output": Kind.GRAD_OUTPUT,
    "grad_input": Kind.GRAD_INPUT,
    "weight.grad": Kind.GRADIENT,
}


def reading(label: str, high: float = 1.0, *, low: float = 0.5, kind: Kind | None = None, dtype: str = "float32") -> Reading:
    """A measured reading; its kind follows from its label unless it is given. That of a loss has the loss itself in ``high``."""
    if kind is None:
        kind = _KINDS.get(label.partition("[")[0], Kind.PARAMETER)
    if kind is Kind.LOSS:
        low, high = high, abs(high)
    return Reading(label, kind, dtype, high if high != high else low, high, state_of(low, high))


def frame(
    *readings: Reading,
    at: tuple[int, int, int] = (0, 0, 0),
    module: str = "layer",
    module_class: str = "Linear",
    phase: Phase = Phase.FORWARD,
) -> Frame:
    rows = readings or (reading("output"),)
    spec = FrameSpec(module, module_class, tuple(ReadingSpec(r.kind, r.label, r.dtype) for r in rows), phase=phase)
    lows, highs = tuple(r.abs_min for r in rows), tuple(r.abs_max for r in rows)
    return Frame(Position(*at), spec, lows, highs, bytes(r.state for r in rows))


def trip(
    *readings: Reading,
    at: tuple[int, int, int] = (0, 0, 0),
    before: tuple[Frame, ...] = (),
    root_inputs: tuple[Reading, ...] = (),
    step: int | None = None,
    module: str = "layer",
    phase: Phase = Phase.FORWARD,
    loss_scale: float = 0.0,
) -> Trip:
    """A trip at the first non-finite non-input of ``readings``, else at the first non-finite input.

    ``step``: by default, one a batch.
    """
    step = max(at[0], 0) if step is None else step
    rows = readings or (reading("input[0]"), reading("output", INF))
    bad = [index for index, row in enumerate(rows) if row.state in (State.INF, State.NAN)]
    own = [index for index in bad if rows[index].kind is not Kind.INPUT]
    last = frame(*rows, at=at, module=module, phase=phase)
    return Trip(Position(*at), (own or bad)[0], (*before, last), root_inputs, step, (2, 3), 6, 0, 1, 1000.0, loss_scale)


def evidenced_trip() -> Trip:
    """A trip with all evidence that a rank can send."""
    operator = made_by("aten.exp.default")
    weight = BadWeight("layer", "Linear", reading("bias", INF), 3, is_here=False)
    looked = replace(trip(), operator=operator, weights=(weight,), harmless=("input[mask]",), collective="all_reduce")
    left_out = LeftOut(restored=("bn.running_mean",), budget_left=2, most=3, of=128)
    return replace(looked, bad_since=2, changed="proj", recurs=True, closeup_within=2.0, left_out=left_out)


def made_by(name: str = "aten.exp.default", node: str = "") -> Operator:
    """An operator with all that is known of one."""
    source = Source("model.py", 87, "forward", "e = torch.exp(scores)")
    return Operator(name, (reading("self", 1e3),), reading("output", INF), (1e3,), ((2, 3),), source, node)


def closeup(**changes: object) -> CloseUp:
    """A close-up with all that a rank can send."""
    found = CloseUp(
        operator=made_by(),
        recurred=3,
        of=3,
        precision=(Precision("float32", State.FINITE, 1.2e5), Precision("float64", State.INF, 0.0)),
        machine="gpu07, NVIDIA H100, GPU-5f3a, PCI 00000000:3B:00.0, driver 550.54",
        note="not run again in bfloat16: out of memory",
        capsule="capsule",
        is_eager=True,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def gpu(number: int = 0) -> Gpu:
    """A GPU with all that is known of one."""
    return Gpu("NVIDIA H200", f"GPU-5f3a{number:04x}", f"0000:{number:02x}:00.0", "550.54.15")


def hello(rank: int = 0, world_size: int = 1, **changes: object) -> messages.Hello:
    """Of a rank on a host of two, without a GPU."""
    (major, minor), host, process = wire.VERSION, f"node{rank // 2}", f"process-{rank}"
    place = messages.Hello(
        major, minor, "train", 0, rank, world_size, rank, host, 100 + rank, "cpu", "2.13.0", process, NO_STAGE
    )
    return replace(place, **changes)  # type: ignore[arg-type]


def fingerprint_table(parameters: int = 2, ranks: int = 2, **changes: Any) -> FingerprintTable:
    """The table of parameters that DDP replicates on ranks from 0 on; of two slots, in turn."""
    mesh = RankMesh(tuple(range(ranks)), (ranks,), (True,), source="DDP")
    rows = tuple(
        FingerprintRow(f"layers.{number}.weight", "float32", 64, 0, number % 2, True) for number in range(parameters)
    )
    data = replace(mesh, replicated=(False,))
    return FingerprintTable(**{"rows": rows, "meshes": (mesh,), "inputs": data, **changes})


def fingerprint(of: FingerprintTable, ordinal: int = 0, values: Sequence[int] = (), **changes: Any) -> Fingerprint:
    """All rows at step ``ordinal``; ``values``: the first lane of each row, 1 where there is none."""
    lanes = b"".join(struct.pack("<QQ", value, 2 * value) for value in [*values, *[1] * (len(of.rows) - len(values))])
    fields = (of.id, 0, ordinal, ordinal, ALL_ROWS, False, False, True, lanes)
    return Fingerprint(*fields)._replace(**changes)


def table() -> FrameTable:
    return FrameTable((frame().spec, frame(reading("weight"), reading("output")).spec))


def summary(batch: int = 0, *, first: int = 0, traced: bool = False, of: FrameTable | None = None) -> BatchSummary:
    of = of or table()
    column = pack(of.typecode, [1.0] * of.rows)
    return BatchSummary(batch, first, batch, 10.0, 11.0, traced, of.id, column, column, bytes(of.rows), 0.5, 1 << 30)


ROOT_LOSS = frame(reading("input[0]"), reading("loss", kind=Kind.LOSS), module="", module_class="Net").spec


def loss_table(label: str, module_class: str) -> FrameTable:
    """Of a part of which the loss alone was measured."""
    return FrameTable((frame(reading(label, kind=Kind.LOSS), module="", module_class=module_class).spec,))


def loss_batch(number: int, loss: float, fed: float = 1.0) -> messages.Batch:
    """A batch of which the root's input and the loss alone were measured."""
    of = FrameTable((ROOT_LOSS,))
    lows, highs = pack(of.typecode, [fed, loss]), pack(of.typecode, [fed, abs(loss)])
    return messages.Batch(number + 1, summary(number, of=of)._replace(abs_min=lows, abs_max=highs))


def beat(*at: int, phase: str = "forward", memory: int = 0) -> messages.Beat:
    return messages.Beat(moment(*at), phase, 0, 0, 1000.0, memory=memory)


def counts(count: int = 5128, digest: int = 2**62, group: int = 77) -> tuple[GroupCount, ...]:
    return (GroupCount(group, count, digest),)


def recounted(
    number: int = 4, first: int = 5127, *calls: CollectiveCall, count: int = 5128, group: int = 77
) -> messages.Recounted:
    """By default two calls, the last ones."""
    usual = (
        CollectiveCall(11, "all_reduce of 4096 float32 (sum)", "train.py:91 in step"),
        CollectiveCall(12, "barrier", "train.py:88 in save"),
    )
    return messages.Recounted(number, group, "the default group", 2, first, count, calls or usual)


def moment(batch: int, evaluation: int, frame: int, step: int | None = None) -> Moment:
    """A moment of a training with one optimizer step a batch."""
    return Moment(max(batch, 0) if step is None else step, batch, evaluation, frame)


def notice(kind: NoticeKind = NoticeKind.HEADROOM, **changes: object) -> Notice:
    """By default an abs max that doubles each batch, four batches away from float16's largest number."""
    usual = Notice(kind, "layer", "Linear", "output", "float16", since=10, batch=12, value=4094.0, growth=1.0)
    return replace(usual, **changes)  # type: ignore[arg-type]
