"""At a trip: gathers what tells its cause. Between trips: remembers which inf and nan were harmless."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..measure.modules import Modules, NamedModule, class_name
from ..measure.recorder import Call, PendingFrame, Recorder, WeightReading
from ..measure.shards import is_bad
from ..measure.sweep import Sweep
from ..rerun.arguments import is_mask
from ..rerun.backward_rerun import FROM_THE_LOSS, origin_of_gradient
from ..rerun.careful import runs_compiled, tensors
from ..rerun.close_up_runs import NOTHING, Subject
from ..rerun.forward import Forward
from ..rerun.limit import WALL_SECONDS, Limit, before_a_trip
from ..rerun.loss_graph import LossOrigin
from ..rerun.repetition import Repeated, repeat
from ..shared.bounded import BoundedDict
from ..shared.types.frame import ALL_FINITE, NON_FINITE, REDUCED, SHARD, SUMMED, Frame, Kind, Phase, ReadingSpec, State
from ..shared.types.trip import BadWeight, GrownWeight, Operator
from ..shared.words.operators import is_own
from ..touch.parts import buffers_in, parameters_in
from ..touch.torch_private import NORMS_WITH_STATISTICS
from .batch import BatchInProgress, BatchPart
from .outside import Outside, OutsideCall
from .steps.growth import Growth
from .steps.optimizer_steps import OptimizerSteps

MAX_WEIGHTS = 16
"""Bad weights in a trip. In a model whose weights are all nan, the first ones say enough."""

MAX_HARMLESS = 4096

_INPUTS = (Kind.INPUT, Kind.KEYWORD)
_GRADIENTS = (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRADIENT)

log = logging.getLogger(__name__)


class Gathered(NamedTuple):
    """What a trip has beside its frames; see ``Trip``."""

    operator: Operator | None = None
    weights: tuple[BadWeight, ...] = ()
    harmless: tuple[str, ...] = ()
    recurs: bool | None = None
    rates: tuple[float, ...] = ()
    grown: GrownWeight | None = None
    reach: float = -1.0
    subject: Subject = NOTHING
    is_meant: bool = False
    """Whether the reading is an inf that the code itself has written."""
    outside: Frame | None = None


class Evidence:
    """The evidence of one rank.

    Args:
        model: the modules of the model.
        sweep: has this rank's own values of sharded parameters.
        outside: the calls of modules that are no part of the model.
        growth: has the weights that other code makes larger.
    """

    def __init__(
        self,
        recorder: Recorder,
        steps: OptimizerSteps,
        model: Modules,
        sweep: Sweep,
        outside: Outside,
        growth: Growth,
    ) -> None:
        self._growth = growth
        self._sweep = sweep
        self._others = outside
        self._uncalled: list[NamedModule] | None = None
        self._recorder = recorder
        self._steps = steps
        self._model = model
        self._harmless = BoundedDict[tuple[str, str, State | None], None](MAX_HARMLESS)

    def look_at_uncalled(self, part: BatchPart) -> None:
        """Measures, at the end of a forward, the weights of modules that were never called: a ParameterList, say.

        They make no frames. When such a weight is bad at a trip, it is known when it was finite.
        """
        if not part.batch.is_full or not part.batch.is_streamed:
            return
        if self._uncalled is None:
            uncalled = [named for named in self._model.watched if not self._recorder.was_called(named)]
            self._uncalled = self._recorder.look_at(uncalled)
        else:
            self._recorder.look_at(self._uncalled)

    def learn(self, part: BatchPart) -> None:
        """A part has no trip: what was not finite in the inputs of modules with finite outputs was harmless."""
        bad = [frame for frame in part.frames if any([cell.is_bad for cell in frame.cells])]
        # They are ignored by request; a loss may still be judged, with the gradients of its step.
        made = [frame for frame in bad if not _bad_kinds(frame).isdisjoint((Kind.OUTPUT, Kind.LOSS))]
        root = part.batch.root_inputs
        if root is not None and not made:
            self._remember("", root)
        for frame in bad:
            if frame not in made:
                self._remember(frame.spec.module, frame)

    def _remember(self, module: str, frame: PendingFrame) -> None:
        for row, cell in zip(frame.spec.readings, frame.cells, strict=True):
            if cell.is_bad and row.kind in _INPUTS:
                self._harmless[module, row.label, cell.state] = None

    def of(self, frame: PendingFrame, culprit: ReadingSpec, part: BatchPart, call: Call | None) -> Gathered:
        """The evidence of a frame whose culprit is this reading. The trip counts without it, too."""
        try:
            return self._gather(frame, culprit, part, call)
        except Exception:
            log.exception("rankwatch: an error of its own as it gathered evidence; the trip is reported without it")
            return Gathered(subject=Subject(note="not run again: rankwatch had an error of its own"))

    def _gather(self, frame: PendingFrame, culprit: ReadingSpec, part: BatchPart, call: Call | None) -> Gathered:
        kind = culprit.kind
        outside = self._outside(frame, kind, part)
        if outside is not None:
            return self._gather_outside(outside)
        grown = self._recorder.grown_weight(self._model.modules)
        forwards = self._forwards(frame, kind, culprit.label, part, call)
        repeated, forward = repeat(forwards)
        again = None
        if kind in _GRADIENTS and not frame.unfound and not culprit.label.endswith((REDUCED, SUMMED)):
            repeated = _of_gradient(frame, kind, part.batch) or repeated
            again = part.batch.run if repeated.recurred else None
        if kind is Kind.LOSS:
            repeated = Repeated(*_of_loss(part))
        weights: tuple[BadWeight, ...] = ()
        if frame.step == self._steps.done:  # an optimizer step would have changed them since
            weights = tuple(self._bad_weights(frame, repeated))[:MAX_WEIGHTS]
        is_meant = repeated.is_meant or (kind is Kind.PARAMETER and is_mask(_parameter(frame, culprit)))
        if not is_meant and len(forwards) > 1 and not _bad_kinds(frame).isdisjoint(_INPUTS):
            is_meant = repeat(forwards[1:])[0].is_meant  # where a mask is from that came into the module
        is_meant &= all(one.finite_in < 0 for one in weights)  # a running statistic that was finite before is no mask
        root = part.batch.root_inputs
        module = frame.spec.module
        labels = self._harmless_of("", root) if root is not None else []
        own = [f"{module}:{label}" for label in self._harmless_of(module, frame)]
        was_given = forward is not None and _only_read(repeated, frame, forward, bool(labels or own))
        is_outside = forward is not None and _is_outside(repeated, forward)
        operator = None if was_given or is_outside else repeated.operator
        roots = [one.module for one in (*forwards, *((again.entry,) if again is not None else ()))]
        is_compiled = part.batch.is_compiled or any(runs_compiled(frame.named.module, one) for one in roots)
        recurs = None if is_compiled and not repeated.recurred else repeated.recurred
        note = "" if forwards or again else frame.unfound or repeated.note or _why_not(frame, kind, is_compiled)
        output = call[2] if call is not None else None
        subject = Subject(forwards, forward, repeated, was_given, is_compiled, note, output, again)
        reach = self._reach(grown) if grown is not None else -1.0
        grown, reach = self._growth.found() or (grown, reach)
        return Gathered(operator, weights, (*labels, *own), recurs, self._steps.rates, grown, reach, subject, is_meant)

    def _outside(self, frame: PendingFrame, kind: Kind, part: BatchPart) -> OutsideCall | None:
        """The module outside of the model that handed it what was bad, or to the loss."""
        if kind is Kind.LOSS:
            made = part.loss_origin.operator if part.loss_origin is not None else None
            is_handed = _has_finite_outputs(part) and (made is None or not is_own(made))
        else:
            root = part.batch.root_inputs
            is_handed = kind not in (Kind.PARAMETER, *_GRADIENTS) and root is not None and self._is_harmful(root)
        return self._others.first_bad() if is_handed else None

    def _is_harmful(self, root: PendingFrame) -> bool:
        rows = zip(root.spec.readings, root.cells, strict=True)
        return any(cell.is_bad and ("", row.label, cell.state) not in self._harmless for row, cell in rows)

    def _gather_outside(self, outside: OutsideCall) -> Gathered:
        forwards = [outside.forward] if outside.forward is not None else []
        repeated, forward = repeat(forwards)
        note = "" if forwards else "not run again: what the module was given is not at hand any more"
        subject = Subject(forwards, forward, repeated, note=note)
        operator = repeated.operator if repeated.given is None else None
        return Gathered(operator, recurs=repeated.recurred, subject=subject, outside=outside.frame.measured())

    def _forwards(self, frame: PendingFrame, kind: Kind, label: str, part: BatchPart, call: Call | None) -> list[Forward]:
        """The forwards that can be repeated: of the frame's module alone, then of the root, which calls it."""
        batch, module = part.batch, frame.named.module
        if frame.spec.phase is not Phase.FORWARD or kind not in (Kind.OUTPUT, Kind.MARKED):
            return []
        entry, found = batch.entry, []
        if not frame.spec.module and kind is Kind.OUTPUT:
            # Also where its frame has no inputs. Of a call of the root by itself these are known in full batches alone.
            given = batch.root_call or (call[:2] if call is not None and batch.is_full else None)
            if given is not None:
                return [Forward(module, *given, label, entry=entry)]
            return [Forward(module, entry.args, entry.kwargs, label, entry=entry)] if entry is not None else []
        if call is not None and batch.is_full and kind is Kind.OUTPUT and not batch.is_run_again:  # else it is over
            found.append(Forward(module, *call[:2], label))
        if entry is not None:
            args, kwargs = batch.root_call or (entry.args, entry.kwargs)
            inner: Any = label if kind is Kind.MARKED else module
            nth = sum(_is_same_call(one, frame, kind, label) for one in part.frames[: part.frames.index(frame) + 1])
            found.append(Forward(entry.module, args, kwargs, label, inner, nth, entry))
        return found

    def _harmless_of(self, module: str, frame: PendingFrame) -> list[str]:
        rows = zip(frame.spec.readings, frame.cells, strict=True)
        return [row.label for row, cell in rows if cell.is_bad and (module, row.label, cell.state) in self._harmless]

    def _reach(self, grown: GrownWeight) -> float:
        named = next((one for one in self._model.modules if one.names[0] == grown.module), None)
        value = named.module._parameters.get(grown.label.partition(SHARD)[0]) if named is not None else None
        reach = self._steps.updates.reach(value, grown.before) if value is not None else 0.0
        return reach or -1.0  # a gradient that is 0 by now tells nothing of the steps before

    def _bad_weights(self, frame: PendingFrame, repeated: Repeated) -> Iterator[BadWeight]:
        """The bad weights of the frame's module and of all others, those nearest to it first."""
        given = repeated.given
        shards = self._sweep.shards()
        ordered = _nearest_first(frame.named, list(self._model.modules))
        found = [one for one in self._recorder.bad_weights(ordered) if _counts(one, given)]
        for one in sorted(found, key=lambda one: not _is_same(one.value, given)):
            name, module = one.named.names[0], one.named.module
            is_here = is_bad(shards.get((id(module), one.reading.label.partition(SHARD)[0])))
            before = self._recorder.dtypes_before(one)
            change, facts = self._steps.updates.change_of(
                one.value, one.finite_in, before, is_apart=bool(shards) or self._steps.are_of_copies
            )
            yield BadWeight(name, class_name(module), one.reading, one.finite_in, is_here, change, facts)


def _why_not(frame: PendingFrame, kind: Kind, is_compiled: bool) -> str:
    """Why there is no forward to run again."""
    if kind is Kind.PARAMETER:
        return "not run again: the weight was bad before this forward"
    if any(row.label.endswith(SUMMED) for row in frame.spec.readings):
        return "each forward of the step was run again, and its own gradient was finite"
    if kind in (Kind.INPUT, Kind.KEYWORD, Kind.BUFFER):
        return "not run again: what came into the module was bad"
    if frame.spec.phase is not Phase.FORWARD or kind in _GRADIENTS:
        return "not run again: what the model was given is not at hand any more"
    if is_compiled:
        return "not run again: it runs compiled, and what the model was given is not at hand"
    return "not run again: what the module was given is not at hand any more"


def _of_gradient(frame: PendingFrame, kind: Kind, batch: BatchInProgress) -> Repeated | None:
    """The operator that made a gradient bad: of the model, whose batch is run again, or of the loss."""
    operator, line = batch.loss_backward.origin() if batch.loss_backward is not None else (None, "")
    is_handed = kind is Kind.GRAD_OUTPUT and not frame.spec.module
    if batch.run is not None and not (is_handed and operator is not None):
        # Of a gradient that the guard has found: no rank waits in a collective.
        limit = Limit(time.monotonic() + WALL_SECONDS) if frame.guarded else before_a_trip()
        found = origin_of_gradient(batch.run, limit)
        if found.note != FROM_THE_LOSS:
            return found
    elif not is_handed:
        return None
    return Repeated(operator, note="; ".join(filter(None, (FROM_THE_LOSS, line))))


def _of_loss(part: BatchPart) -> tuple[Operator | None, None, None, str]:
    """The operator that made the loss bad, and what is not known of it, as a ``Repeated`` begins."""
    origin = part.loss_origin or LossOrigin()
    origin = origin.later() if origin.later is not None else origin
    note = origin.note
    if origin.supposes_finite and not _has_finite_outputs(part):
        origin, note = LossOrigin(), "its operator is not known: the model's outputs were not at hand any more"
    called = f"; backward was called at {origin.caller.file}:{origin.caller.line}" if origin.caller is not None else ""
    note = f"not run again: the loss is computed outside of the model's forward{called}" + (f"; {note}" if note else "")
    return origin.operator, None, None, note


def _has_finite_outputs(part: BatchPart) -> bool:
    """Whether what the model returned was finite."""
    frames = part.loss_of.frames if part.loss_of is not None else part.frames
    found = [frame for frame in frames if not frame.spec.module and frame.spec.phase is Phase.FORWARD]
    made = [
        cell.state
        for frame in found
        for row, cell in zip(frame.spec.readings, frame.cells, strict=True)
        if row.kind is Kind.OUTPUT
    ]
    return not ALL_FINITE.isdisjoint(made) and NON_FINITE.isdisjoint(made)


def _is_same_call(one: PendingFrame, frame: PendingFrame, kind: Kind, label: str) -> bool:
    """Whether a frame is a call of the same module, or has the same mark."""
    first = one.spec.readings[0] if one.spec.readings else None
    is_mark = first is not None and first.kind is Kind.MARKED
    if kind is Kind.MARKED:
        return is_mark and first is not None and first.label == label
    return one.named is frame.named and not is_mark


def _is_outside(repeated: Repeated, forward: Forward) -> bool:
    """Whether the operator ran before the module whose output was bad: between modules, or in another one."""
    return isinstance(forward.inner, nn.Module) and forward.inner not in repeated.modules


def _only_read(repeated: Repeated, frame: PendingFrame, forward: Forward, has_masks: bool) -> bool:
    """Whether the operator did no more than to read a bad input or weight of the module: these are evidence by themselves."""
    operator = repeated.operator
    if repeated.given is None or operator is None:
        return False
    known = [*parameters_in(frame.named.module), *buffers_in(frame.named.module), *tensors([forward.args, forward.kwargs])]
    made_nan = operator.output.state is State.NAN and all(one.state is not State.NAN for one in operator.inputs)
    return not (made_nan and has_masks) and any(_is_same(value, repeated.given) for value in known)


def _parameter(frame: PendingFrame, row: ReadingSpec) -> Tensor | None:
    return frame.named.module._parameters.get(row.label)


def _bad_kinds(frame: PendingFrame) -> set[Kind]:
    return {row.kind for row, cell in zip(frame.spec.readings, frame.cells, strict=True) if cell.is_bad}


def _nearest_first(named: NamedModule, modules: list[NamedModule]) -> list[NamedModule]:
    """The module, those below it, those around it (the innermost first), then all others."""
    below, around, rest = [], [], []
    for one in modules:
        if one is named:
            continue
        if any(_is_below(name, outer) for name in one.names for outer in named.names):
            below.append(one)
        elif any(_is_below(name, outer) for name in named.names for outer in one.names):
            around.append(one)
        else:
            rest.append(one)
    return [named, *below, *sorted(around, key=lambda one: -len(one.names[0])), *rest]


def _is_below(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _counts(one: WeightReading, given: Tensor | None) -> bool:
    """Whether a bad weight may be the cause. Statistics that this forward has updated are not, nor is a mask of -inf."""
    module, reading = one.named.module, one.reading
    if is_mask(one.value):
        return False
    if reading.kind is Kind.PARAMETER or _is_same(one.value, given):
        return True
    if isinstance(module, NORMS_WITH_STATISTICS):
        return not (module.training and module.track_running_stats)
    return reading.state is State.NAN or one.finite_in >= 0


def _is_same(value: Tensor, other: Tensor | None) -> bool:
    if other is None:
        return False
    return value is other or (value.data_ptr() == other.data_ptr() and value.device == other.device)
