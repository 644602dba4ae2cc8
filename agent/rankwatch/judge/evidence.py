"""At a trip: gathers what tells its cause. Between trips: remembers which inf and nan were harmless."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from ..measure.modules import NamedModule, class_name
from ..measure.recorder import Call, PendingFrame, Recorder, WeightReading
from ..measure.shards import Key, is_bad
from ..measure.walk import leaves
from ..rerun.repetition import Repeated, repeat
from ..shared.bounded import BoundedDict
from ..shared.frame import SHARD, Kind, Phase, State
from ..shared.trip import BadWeight, Operator
from .batch import BatchPart

MAX_WEIGHTS = 16
"""Bad weights in a trip. In a model whose weights are all nan, the first ones say enough."""

MAX_HARMLESS = 4096

_INPUTS = (Kind.INPUT, Kind.KEYWORD)

log = logging.getLogger(__name__)


class Gathered(NamedTuple):
    """What a trip has beside its frames; see ``Trip``."""

    operator: Operator | None = None
    weights: tuple[BadWeight, ...] = ()
    harmless: tuple[str, ...] = ()


class Evidence:
    """The evidence of one rank.

    Args:
        steps: returns the number of optimizer steps done.
        modules: returns the modules of the model; ``watched``: those with hooks.
        shards: returns this rank's own values of sharded parameters.
    """

    def __init__(
        self,
        recorder: Recorder,
        steps: Callable[[], int],
        modules: Callable[[], Iterable[NamedModule]],
        watched: Callable[[], Iterable[NamedModule]],
        shards: Callable[[], Mapping[Key, Tensor]],
    ) -> None:
        self._shards = shards
        self._watched = watched
        self._uncalled: list[NamedModule] | None = None
        self._recorder = recorder
        self._steps = steps
        self._modules = modules
        self._harmless = BoundedDict[tuple[str, str, State | None], None](MAX_HARMLESS)

    def look_at_uncalled(self, part: BatchPart) -> None:
        """Measures, at the end of a forward, the weights of modules that were never called: a ParameterList, say.

        They make no frames. When such a weight is bad at a trip, it is known when it was finite.
        """
        if not part.batch.is_full or not part.batch.is_streamed:
            return
        if self._uncalled is None:
            uncalled = [named for named in self._watched() if not self._recorder.was_called(named)]
            self._uncalled = self._recorder.look_at(uncalled)
        else:
            self._recorder.look_at(self._uncalled)

    def learn(self, part: BatchPart) -> None:
        """A part has no trip: what was not finite in the inputs of modules with finite outputs was harmless."""
        bad = [frame for frame in part.frames if any([cell.is_bad for cell in frame.cells])]
        made = [frame for frame in bad if Kind.OUTPUT in _bad_kinds(frame)]  # they are ignored by request
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

    def of(self, frame: PendingFrame, kind: Kind, part: BatchPart, call: Call | None) -> Gathered:
        """The evidence of a frame whose culprit is a reading of this kind. The trip counts without it, too."""
        try:
            return self._gather(frame, kind, part, call)
        except Exception:
            log.exception("rankwatch: an error of its own as it gathered evidence; the trip is reported without it")
            return Gathered()

    def _gather(self, frame: PendingFrame, kind: Kind, part: BatchPart, call: Call | None) -> Gathered:
        given = self._given(frame, part, call) if kind is Kind.OUTPUT else None
        repeated = repeat(frame.named.module, *given) if given is not None else None
        weights: tuple[BadWeight, ...] = ()
        if frame.step == self._steps():  # an optimizer step would have changed them since
            weights = tuple(self._bad_weights(frame, repeated))[:MAX_WEIGHTS]
        root = part.batch.root_inputs
        module = frame.spec.module
        labels = self._harmless_of("", root) if root is not None else []
        own = [f"{module}:{label}" for label in self._harmless_of(module, frame)]
        operator = repeated.operator if repeated is not None else None
        if repeated is not None and given is not None and _only_read(repeated, frame, given, bool(labels or own)):
            operator = None
        return Gathered(operator, weights, (*labels, *own))

    def _given(self, frame: PendingFrame, part: BatchPart, call: Call | None) -> tuple[Any, Any] | None:
        """The args and kwargs of a forward that can be repeated."""
        batch = part.batch
        if frame.spec.phase is not Phase.FORWARD or batch.is_compiled:
            return None
        if batch.root_call is not None and not frame.spec.module:
            return batch.root_call  # also at a batch's end, and where the root's frame has no inputs
        return call[:2] if call is not None and batch.is_full else None

    def _harmless_of(self, module: str, frame: PendingFrame) -> list[str]:
        rows = zip(frame.spec.readings, frame.cells, strict=True)
        return [row.label for row, cell in rows if cell.is_bad and (module, row.label, cell.state) in self._harmless]

    def _bad_weights(self, frame: PendingFrame, repeated: Repeated | None) -> Iterator[BadWeight]:
        """The bad weights of the frame's module and of all others, those nearest to it first."""
        given = repeated.given if repeated is not None else None
        shards = self._shards()
        ordered = _nearest_first(frame.named, list(self._modules()))
        found = [one for one in self._recorder.bad_weights(ordered) if _counts(one, given)]
        for one in sorted(found, key=lambda one: not _is_same(one.value, given)):
            name, module = one.named.names[0], one.named.module
            is_here = is_bad(shards.get((id(module), one.reading.label.partition(SHARD)[0])))
            yield BadWeight(name, class_name(module), one.reading, one.finite_in, is_here)


def _only_read(repeated: Repeated, frame: PendingFrame, given: tuple[Any, Any], has_masks: bool) -> bool:
    """Whether the operator did no more than to read a bad input or weight of the module: these are evidence by themselves."""
    operator = repeated.operator
    if repeated.given is None or operator is None:
        return False
    known = [*frame.named.module.parameters(), *frame.named.module.buffers(), *_tensors(given)]
    made_nan = operator.output.state is State.NAN and all(one.state is not State.NAN for one in operator.inputs)
    return not (made_nan and has_masks) and any(_is_same(value, repeated.given) for value in known)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(values, "") if isinstance(leaf, Tensor)]


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
    if reading.kind is Kind.PARAMETER or _is_same(one.value, given):
        return True
    if isinstance(module, _NormBase):
        return not (module.training and module.track_running_stats)
    return reading.state is State.NAN or one.finite_in >= 0


def _is_same(value: Tensor, other: Tensor | None) -> bool:
    if other is None:
        return False
    return value is other or (value.data_ptr() == other.data_ptr() and value.device == other.device)
