"""At a trip: repeats a forward, and finds the operator that made the bad numbers.

The forward runs under a dispatch mode that sees each operator with its inputs and outputs. For each bad tensor it remembers
where its bad numbers came from. ``careful`` sees to it that the repetition harms nothing. The hooks of the watch see the
mode, and only tell it which module has returned.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..shared.types.frame import Kind, State
from ..shared.types.trip import Operator
from ..touch.parts import buffers_in, parameters_in
from .arguments import (
    Input,
    holds_mask,
    inputs_of,
    is_given,
    is_mask,
    name_of,
    operands_of,
    reading_of,
    state_of_tensor,
    storage_of,
    values_of,
    written,
)
from .careful import Altered, Careful, Stopped, tensors, uncollected
from .details import detail_of
from .engine import Rerun
from .forward import Forward
from .limit import Limit, before_a_trip
from .user_line import modules_within_run

_MAKES_GARBAGE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted")
"""Their outputs are memory that nobody has written to yet."""

_CONSTANTS = ("lift_fresh", "lift_fresh_copy")
"""The operators through which ``torch.tensor(...)`` comes."""

_SOFTMAX = ("_softmax", "softmax", "_safe_softmax", "_log_softmax", "log_softmax")
_ABSORB = (*_SOFTMAX, "exp", "exp2", "sigmoid", "tanh", "expm1")
"""-inf goes in, and a finite number comes out: their inf or nan has another origin. A softmax of -inf alone is nan."""

_LOGS = ("log", "log2", "log10")
"""A log of zeros is a usual way to make a mask of -inf: it is meant where zeros and ones went in that are no data, and that
nothing has trained."""

_NEGATIVE = (*_CONSTANTS, *_SOFTMAX, *_LOGS)
"""Of these, -inf alone is a mask: a number of Python's may have been computed, and the log of a softmax is never inf."""

WRITES = (
    *("masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill", "fill_", "scalar_tensor"),
    *("index_fill", "index_fill_", "fill_diagonal_", "constant_pad_nd"),
)
"""The operators by which code writes an inf that it means: a mask of actions, classes or words."""

_ATTENDS = "_scaled_dot_product"


class Repeated(NamedTuple):
    """A repeated forward: whether its output was bad again, and where the bad numbers came from.

    ``recurred``: None if that is not known; ``note`` then says why. ``given`` is a bad tensor that was there before, and
    ``operator`` then the first one that read it; ``note`` says if the module may have made it as it ran first. ``modules`` are
    those in which the operator ran, the innermost first. ``is_late``: it was stopped because of the time. ``grad``: it ran with
    gradients enabled. ``communicates``: it was stopped before a collective. ``is_meant``: all that was bad is inf of one sign
    that the code itself has written.
    """

    operator: Operator | None = None
    given: Tensor | None = None
    recurred: bool | None = None
    note: str = ""
    modules: tuple[nn.Module, ...] = ()
    is_late: bool = False
    grad: bool = False
    communicates: bool = False
    is_meant: bool = False


UNKNOWN = Repeated()


@uncollected()
def repeat(
    forwards: Sequence[Forward], limit: Limit | None = None, wanted: Callable[[], bool] = lambda: True
) -> tuple[Repeated, Forward | None]:
    """Repeats the first of these forwards of which it is then known whether it recurs; or the first one, if there is none.

    ``limit``: None: as before a trip.
    """
    limit = limit or before_a_trip()
    found, which = UNKNOWN, None
    for forward in forwards:
        repeated = _repeat(forward, limit, wanted)
        is_better = repeated.recurred is not None or (repeated.operator is not None and found.operator is None)
        if which is None or is_better:
            found, which = repeated, forward
        if found.recurred is not None:
            break
    return found, which


def _repeat(forward: Forward, limit: Limit, wanted: Callable[[], bool]) -> Repeated:
    if refusal := forward.refusal:
        return Repeated(note=refusal)
    found = UNKNOWN
    for grad in (False, True):  # some modules need gradients, or do something else with them
        found, was_stopped = _once(forward, Repetition(forward, limit, wanted), grad=grad)
        if found.recurred or was_stopped or not torch.is_grad_enabled():
            break
    return found


def _once(forward: Forward, mode: Repetition, *, grad: bool) -> tuple[Repeated, bool]:
    """What a repetition shows, and whether it was stopped."""
    ran = Rerun(forward, mode).forward(grad=grad)
    if ran.was_stopped:
        found = mode.communicated or Repeated(note=ran.note, is_late=mode.is_late)
        return found._replace(communicates=mode.came_to_collective), True
    if ran.values is None:
        return Repeated(note=ran.note), False
    differs = why_it_differs(forward, ran.changes)
    found = mode.origin_of(ran.values) or Repeated(recurred=None if differs else False, note=differs)
    if found.given is not None and not (mode.is_fed(found.given) or _is_of(forward.module, found.given)):
        found = found._replace(note=differs)
    return found._replace(grad=grad), False


def why_it_differs(forward: Forward, changes: Altered) -> str:
    """Why a forward that was finite when it was run again may not have been the same forward. Empty: it was."""
    if changes.drew_others or (changes.drew and forward.entry is None):
        return "it draws random numbers, and drew others when it was run again"
    if changes.names:
        names = ", ".join(dict.fromkeys(changes.names[:3]))
        return f"it changes {names} of its own, which may have been different before"
    return ""


class _Rank(enum.IntEnum):
    """How likely an origin is to blame: the lowest first. All but the first may be meant, as a mask of -inf is."""

    HARD = 0
    LOG_OF_ZERO = 1
    NAN_OF_INF = 2
    GIVEN_INF = 3
    CONSTANT = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """Where bad numbers came from: an operator, a tensor that was there before, or an operator on such a tensor."""

    rank: _Rank
    order: int
    operator: Operator | None = None
    given: Tensor | None = None
    modules: tuple[nn.Module, ...] = ()


class Repetition(Careful):
    """Follows bad numbers through the operators of a forward, from storage to storage."""

    def __init__(self, forward: Forward, limit: Limit, wanted: Callable[[], bool] = lambda: True) -> None:
        super().__init__([*buffers_in(forward.module)], limit, wanted)
        self.communicated: Repeated | None = None
        """The origin of bad numbers that were about to be sent to other ranks, where the repetition stopped."""
        self._forward = forward
        self._given: tuple[Any, Any] = (), {}
        """The arguments of the operator that runs."""
        self._origins: dict[int, tuple[_Origin, ...]] = {}
        self._held: list[Tensor] = []  # so that no address of a bad tensor is used again
        fed = tensors([forward.args, forward.kwargs])
        self._learnt_or_fed = {storage_of(value) for value in fed if value.is_floating_point()}
        """The storages of numbers that are fed, or depend on what is trained. What is chosen by them, as a mask is, has none."""

    def origin_of(self, outputs: list[Tensor]) -> Repeated | None:
        """The origin of what is bad in these outputs; None if nothing is."""
        bad = [value for value in outputs if state_of_tensor(value) is not State.FINITE]
        origins = [origin for value in bad for origin in self._of(value, lambda: None)]
        if not origins:
            return None
        first = min(origins, key=lambda origin: (origin.rank, origin.order))
        is_meant = self._are_meant(bad, origins)
        return Repeated(first.operator, first.given, recurred=True, modules=first.modules, is_meant=is_meant)

    def is_fed(self, value: Tensor) -> bool:
        """Whether the forward was given this tensor, or a view of it."""
        return storage_of(value) in {storage_of(fed) for fed in tensors([self._forward.args, self._forward.kwargs])}

    def _are_meant(self, bad: list[Tensor], origins: list[_Origin]) -> bool:
        """Whether an inf was written by the code, or is a mask of -inf that it holds: no number has become so large."""
        if any(value.is_complex() or state_of_tensor(value) is not State.INF for value in bad):
            return False
        if not all(bool(torch.isfinite(values_of(value)).any()) for value in bad):  # a mask leaves something
            return False
        is_positive = any(map(_has_positive_inf, bad))
        if is_positive and any(bool(torch.isneginf(values_of(value)).any()) for value in bad):
            return False
        for origin in origins:
            operator, given = origin.operator, origin.given
            name = operator.title.rpartition(".")[2] if operator is not None else ""
            if given is not None:
                if _has_positive_inf(given) or is_positive or self.is_fed(given) or _is_weight(given):
                    return False
            elif origin.rank is not _Rank.CONSTANT or not (name in WRITES or (not is_positive and name in _NEGATIVE)):
                return False
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            self.guard(func, args, kwargs)
        except Stopped:
            self._look_at_what_is_sent(func, args, kwargs)
            raise
        inputs = list(inputs_of(func, args, kwargs))
        self._given = args, kwargs
        result = func(*args, **kwargs)
        name = name_of(func)
        outputs = tensors(result)
        outputs += [value for value in written(func, args, kwargs) if not any(value is one for one in outputs)]
        self.own([value for value in outputs if not is_given(value, inputs)], [one.value for one in inputs])
        made = {storage_of(value) for value in outputs if value.is_floating_point()}
        self._learnt_or_fed = self._learnt_or_fed | made if self._are_learnt_or_fed(inputs) else self._learnt_or_fed - made
        for output in outputs:
            is_view = getattr(func, "is_view", False) and name not in _CONSTANTS
            if is_view and is_given(output, inputs):  # what reads it is told
                continue
            state = state_of_tensor(output) if name not in _MAKES_GARBAGE else State.FINITE
            if state is not State.FINITE:
                self._held.append(output)
                self._origins[storage_of(output)] = self._trace(func, inputs, output, state)
        return result

    def _look_at_what_is_sent(self, func: Any, args: Any, kwargs: Any) -> None:
        """A collective is not run. What made its own part bad is known all the same."""
        if self.communicated is not None or not self.communicates(func):
            return
        sent = [value for value in tensors([args, kwargs]) if storage_of(value) in self._origins]
        found = self.origin_of(sent)
        if found is not None and found.operator is not None and found.given is None:
            self.communicated = found._replace(recurred=None, note=self.stopped)

    def _trace(self, func: Any, inputs: list[Input], output: Tensor, state: State) -> tuple[_Origin, ...]:
        """The origins of a bad output."""
        name = name_of(func).removesuffix("_")
        bad = [(one, one.value) for one in inputs if isinstance(one.value, Tensor) and one.state is not State.FINITE]
        if name in _CONSTANTS or (not bad and state is State.INF and any(one.state is not State.FINITE for one in inputs)):
            return (self._made(_Rank.CONSTANT, func, inputs, output),)
        if not bad:
            is_log = name in _LOGS and state is State.INF
            rank = _Rank.LOG_OF_ZERO if is_log else _Rank.HARD
            is_mask = is_log and holds_mask(output) and not self._are_learnt_or_fed(inputs)
            return (self._made(_Rank.CONSTANT if is_mask else rank, func, inputs, output),)
        origins = tuple(
            dict.fromkeys(
                origin
                for one, value in bad
                for origin in self._of(value, lambda: self._operator(func, inputs, output), one.changed)
            )
        )
        if any(origin.rank is _Rank.HARD for origin in origins) or any(one.state is State.NAN for one, _ in bad):
            return origins
        if name in _ABSORB and not any(_has_positive_inf(value) for _, value in bad):
            # The log of a softmax is -inf where a mask is.
            is_mask = state is State.INF and all(origin.rank is _Rank.CONSTANT for origin in origins)
            rank = _Rank.CONSTANT if is_mask else _Rank.HARD
            return (self._made(rank, func, inputs, output, masked=name in _SOFTMAX),)
        if name.startswith(_ATTENDS) and all("mask" in one.label or "bias" in one.label for one, _ in bad):
            return (self._made(_Rank.HARD, func, inputs, output, masked=True),)
        if state is State.NAN:
            given = next((origin.given for origin in origins if origin.given is not None), None)
            return (self._made(_Rank.NAN_OF_INF, func, inputs, output, given), *origins)
        return origins

    def _are_learnt_or_fed(self, inputs: list[Input]) -> bool:
        """A repetition runs without gradients: what depends on something trained does not say so by itself."""
        values = [one.value for one in inputs if isinstance(one.value, Tensor)]
        return any(value.requires_grad or storage_of(value) in self._learnt_or_fed for value in values)

    def _of(
        self, value: Tensor, reader: Callable[[], Operator | None], changed: Tensor | None = None
    ) -> tuple[_Origin, ...]:
        """The origins of an operator's bad input, or of a bad output of the module; ``reader`` returns this operator.

        ``changed``: the tensor itself, of which the value is a copy.
        """
        itself = value if changed is None else changed
        known = self._origins.get(storage_of(itself))
        if known is None:
            self._held.append(itself)
            rank = _Rank.GIVEN_INF if state_of_tensor(value) is State.INF else _Rank.HARD
            known = self._origins[storage_of(itself)] = (_Origin(rank, self.count, reader(), itself, modules_within_run()),)
        return known

    def _made(
        self,
        rank: _Rank,
        func: Any,
        inputs: list[Input],
        output: Tensor,
        given: Tensor | None = None,
        masked: bool = False,
    ) -> _Origin:
        operator = self._operator(func, inputs, output)
        operator = replace(operator, operands=(-math.inf,)) if masked else operator
        return _Origin(rank, self.count, operator, given, modules_within_run())

    def _operator(self, func: Any, inputs: list[Input], output: Tensor) -> Operator:
        caller = self._forward.caller_of_operator()
        return Operator(
            str(func),
            tuple([reading_of(one.label, Kind.INPUT, one.value) for one in inputs]),
            reading_of("output", Kind.OUTPUT, output),
            operands_of(func, inputs, output),
            tuple([tuple(one.value.shape) if isinstance(one.value, Tensor) else () for one in inputs]),
            caller.source if caller is not None else None,
            detail=detail_of(func, *self._given),
        )


def _is_of(module: nn.Module, value: Tensor) -> bool:
    """Whether a tensor is a parameter or a buffer of the module."""
    return storage_of(value) in {storage_of(one) for one in (*parameters_in(module), *buffers_in(module))}


def _is_weight(value: Tensor) -> bool:
    return isinstance(value, nn.Parameter) and not is_mask(value)


def _has_positive_inf(value: Tensor) -> bool:
    return value.is_complex() or bool(torch.isposinf(values_of(value)).any())
