"""At a trip: repeats the forward of one module, and finds the operator that made the bad numbers.

The forward runs under a dispatch mode that sees each operator with its inputs and outputs. For each bad tensor it remembers
where its bad numbers came from. The repetition changes nothing that the training still needs: it writes to no tensor that
it did not make, restores buffers and random state, and stops before an operator that communicates, because the other ranks
do not repeat anything. The hooks of the watch see the mode, and do nothing.
"""

from __future__ import annotations

import enum
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..measure.extremes import dtype_name
from ..measure.walk import leaves
from ..shared.frame import Kind, Reading, State, state_of
from ..shared.trip import Operator

log = logging.getLogger(__name__)

MAX_SECONDS = 1.0
"""The other ranks wait in a collective, or come to one, while this rank repeats."""

MAX_OPERATORS = 100_000

_COMMUNICATES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "fsdp", "_dtensor")
_SHARDS = ("FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel", "DeepSpeedEngine")

_MAKES_GARBAGE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted")
"""Their outputs are memory that nobody has written to yet."""

_OVERWRITES = ("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "set_")
"""They write to their first argument without reading it."""

_CONSTANTS = ("lift_fresh", "lift_fresh_copy")
"""The operators through which ``torch.tensor(...)`` comes."""

_SOFTMAX = ("_softmax", "softmax", "_safe_softmax", "_log_softmax", "log_softmax")
_ABSORB = (*_SOFTMAX, "exp", "exp2", "sigmoid", "tanh", "expm1")
"""-inf goes in, and a finite number comes out: their inf or nan has another origin. A softmax of -inf alone is nan."""

_LOGS = ("log", "log2", "log10", "log_")
"""A log of zeros is a usual way to make a mask of -inf."""

_NUMBERS = ("number", "float", "Tensor")
"""The types of an argument for which a number may be passed."""

_ATTENDS = "_scaled_dot_product"


class Repeated(NamedTuple):
    """Where the bad output of a repeated forward came from: an operator, or a bad tensor that was there before.

    If there is a bad tensor, the operator is the first one that read it.
    """

    operator: Operator | None
    given: Tensor | None


def repeat(module: nn.Module, args: Any, kwargs: Any) -> Repeated | None:
    """Repeats a forward whose output was bad; None if it cannot be repeated, or is not bad again."""
    try:
        if _must_not_run(module, args, kwargs):
            return None
        found = _repeat(module, args, kwargs, grad=False)
        if found is None and torch.is_grad_enabled():  # some modules need gradients, or do something else with them
            found = _repeat(module, args, kwargs, grad=True)
        return found
    except _Stopped as stop:
        log.debug("%s was not repeated to its end: %s", type(module).__name__, stop)
    except Exception as error:  # noqa: BLE001  the trip matters more than its operator
        log.debug("%s cannot be repeated: %r", type(module).__name__, error)
    return None


def is_repeating() -> bool:
    """Whether the calling code runs in a forward that is being repeated."""
    return any(isinstance(mode, Repetition) for mode in _get_current_dispatch_mode_stack())


def _repeat(module: nn.Module, args: Any, kwargs: Any, grad: bool) -> Repeated | None:
    mode = Repetition(buffers=[*module.buffers()])
    with _restored(module), _same_surroundings(module, args, kwargs), torch.set_grad_enabled(grad):
        try:
            with mode:
                output = _hooked(module, args, kwargs, module.forward(*args, **kwargs))
        except Exception as error:
            mode.check()
            if grad:
                raise
            log.debug("%s cannot be repeated without gradients: %r", type(module).__name__, error)
            return None
        mode.check()  # the forward may have caught what stopped it
        return mode.origin_of([leaf for _, leaf in leaves(output, "output") if isinstance(leaf, Tensor)])


def _hooked(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """What the user's forward hooks make of an output, up to the hook of the watch, which saw the bad one."""
    for key, hook in module._forward_hooks.items():
        if type(hook).__module__.startswith("rankwatch."):
            break
        given = (args, kwargs, output) if key in module._forward_hooks_with_kwargs else (args, output)
        changed: Any = hook(module, *given)
        output = output if changed is None else changed
    return output


def _must_not_run(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a repetition might communicate in a way that the mode does not see, or is not the same code."""
    interpreter = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
    if not hasattr(torch._C, "_len_torch_dispatch_stack") or interpreter() is not None:
        return True
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    for inner in module.modules():
        names = {cls.__name__ for cls in type(inner).__mro__}
        is_compiled = "_orig_mod" in inner._modules or getattr(inner, "_compiled_call_impl", None) is not None
        if not names.isdisjoint(_SHARDS) or (is_compiled and inner is not module):
            return True
    given = [leaf for _, leaf in [*leaves(list(args), ""), *leaves(dict(kwargs), "")]]
    return any(
        hasattr(value, "to_local") or hasattr(value, "ds_id") or hasattr(value, "_fsdp_flattened")
        for value in [*module.parameters(), *module.buffers(), *given]
    )


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restores the buffers of a module and of those below it."""
    buffers = [
        (inner, name, value, value.detach().clone())
        for inner in module.modules()
        for name, value in inner._buffers.items()
        if value is not None and not value.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for inner, name, value, before in buffers:
                inner._buffers[name] = value
                if not torch.equal(value, before):  # batch_norm writes without a new version
                    value.copy_(before)


@contextmanager
def _same_surroundings(module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """Random state restored; autocast without its cache of weights, which would hide their casts; nothing compiled."""
    tensors = [*module.parameters(), *module.buffers(), *(leaf for _, leaf in leaves([args, kwargs], ""))]
    devices = {value.device for value in tensors if isinstance(value, Tensor) and value.device.type == "cuda"}
    eager: AbstractContextManager[Any] = nullcontext()
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        eager = torch.compiler.set_stance("force_eager")
    had_cache = torch.is_autocast_cache_enabled()
    with torch.random.fork_rng(devices=list(devices)), eager:
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(had_cache)


class _Stopped(BaseException):
    """Ends a repetition. Not an Exception, which a user's forward may catch."""


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


class _Input(NamedTuple):
    """A tensor or number that an operator reads, as it is before the operator runs."""

    label: str
    value: Tensor | float
    state: State


class Repetition(TorchDispatchMode):
    """Follows bad numbers through the operators of a forward, from storage to storage."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stopped = ""
        self._until = time.monotonic() + MAX_SECONDS
        self._count = 0
        self._ours = {_storage(value) for value in buffers}
        """The storages that may be written to."""
        self._origins: dict[int, tuple[_Origin, ...]] = {}
        self._held: list[Tensor] = []  # so that no address of a bad tensor is used again

    def check(self) -> None:
        if self.stopped:
            raise _Stopped(self.stopped)

    def origin_of(self, outputs: list[Tensor]) -> Repeated | None:
        """The origin of what is bad in these outputs; None if nothing is."""
        bad = [value for value in outputs if _state(value) is not State.FINITE]
        origins = [origin for value in bad for origin in self._of(value, lambda: None)]
        if not origins:
            return None
        first = min(origins, key=lambda origin: (origin.rank, origin.order))
        return Repeated(first.operator, first.given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._count += 1
        if getattr(func, "namespace", "") in _COMMUNICATES:
            self.stopped = self.stopped or f"it communicates by {func}"
        elif self._count > MAX_OPERATORS or time.monotonic() > self._until:
            self.stopped = self.stopped or f"it takes longer than {MAX_SECONDS:g} s"
        elif any(_storage(value) not in self._ours for value in _written(func, args, kwargs)):
            self.stopped = self.stopped or f"{func} changes a tensor that is not its own"
        self.check()
        inputs = list(_inputs(func, args, kwargs))
        result = func(*args, **kwargs)
        name = _name(func)
        outputs = [leaf for _, leaf in leaves(result, "output") if isinstance(leaf, Tensor)]
        outputs += [value for value in _written(func, args, kwargs) if not any(value is one for one in outputs)]
        for output in outputs:
            if not _is_given(output, inputs):
                self._ours.add(_storage(output))
            state = _state(output) if name not in _MAKES_GARBAGE else State.FINITE
            if state is not State.FINITE:
                self._held.append(output)
                self._origins[_storage(output)] = self._trace(func, inputs, output, state)
        return result

    def _trace(self, func: Any, inputs: list[_Input], output: Tensor, state: State) -> tuple[_Origin, ...]:
        """The origins of a bad output."""
        name = _name(func)
        bad = [(one.label, one.value) for one in inputs if isinstance(one.value, Tensor) and one.state is not State.FINITE]
        if name in _CONSTANTS or (not bad and state is State.INF and any(one.state is not State.FINITE for one in inputs)):
            return (self._made(_Rank.CONSTANT, func, inputs, output),)
        if not bad:
            is_log = name in _LOGS and state is State.INF
            return (self._made(_Rank.LOG_OF_ZERO if is_log else _Rank.HARD, func, inputs, output),)
        origins = tuple(
            dict.fromkeys(
                origin for _, value in bad for origin in self._of(value, lambda: self._operator(func, inputs, output))
            )
        )
        if any(origin.rank is _Rank.HARD for origin in origins) or any(_state(value) is State.NAN for _, value in bad):
            return origins
        if name in _ABSORB and not any(_has_positive_inf(value) for _, value in bad):
            return (self._made(_Rank.HARD, func, inputs, output, masked=name in _SOFTMAX),)
        if name.startswith(_ATTENDS) and all("mask" in label or "bias" in label for label, _ in bad):
            return (self._made(_Rank.HARD, func, inputs, output, masked=True),)
        if state is State.NAN:
            given = next((origin.given for origin in origins if origin.given is not None), None)
            return (self._made(_Rank.NAN_OF_INF, func, inputs, output, given), *origins)
        return origins

    def _of(self, value: Tensor, reader: Callable[[], Operator | None]) -> tuple[_Origin, ...]:
        """The origins of an operator's bad input, or of a bad output of the module; ``reader`` returns this operator."""
        known = self._origins.get(_storage(value))
        if known is None:
            self._held.append(value)
            rank = _Rank.GIVEN_INF if _state(value) is State.INF else _Rank.HARD
            known = self._origins[_storage(value)] = (_Origin(rank, self._count, reader(), value),)
        return known

    def _made(
        self,
        rank: _Rank,
        func: Any,
        inputs: list[_Input],
        output: Tensor,
        given: Tensor | None = None,
        masked: bool = False,
    ) -> _Origin:
        operator = self._operator(func, inputs, output)
        return _Origin(rank, self._count, replace(operator, operands=(-math.inf,)) if masked else operator, given)

    def _operator(self, func: Any, inputs: list[_Input], output: Tensor) -> Operator:
        readings = tuple([_reading(one.label, Kind.INPUT, one.value) for one in inputs])
        return Operator(str(func), readings, _reading("output", Kind.OUTPUT, output), _operands(func, inputs, output))


def _has_positive_inf(value: Tensor) -> bool:
    return value.is_complex() or bool(torch.isposinf(_values(value)).any())


def _name(func: Any) -> str:
    """``exp`` of ``aten.exp.default``."""
    return str(getattr(func, "_opname", "")) or str(func).split(".")[1]


def _storage(value: Tensor) -> int:
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no storage of its own
        return id(value)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, str, Any]]:
    """Each argument that was passed: its row of the schema, label and value; the items of a list one by one."""
    for index, row in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(row.name)
        if isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                yield row, f"{row.name}[{number}]", item
        elif value is not None:
            yield row, row.name, value


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    found = _arguments(func, args, kwargs)
    return [value for row, _, value in found if _is_written(row) and isinstance(value, Tensor)]


def _is_written(row: Any) -> bool:
    return row.alias_info is not None and row.alias_info.is_write


def _inputs(func: Any, args: Any, kwargs: Any) -> Iterator[_Input]:
    """What an operator reads: its tensors, those that it changes in place as copies, and its numbers."""
    overwrites = _name(func) in _OVERWRITES
    for row, label, value in _arguments(func, args, kwargs):
        if isinstance(value, Tensor):
            if row.is_out or (overwrites and _is_written(row)):
                continue
            yield _Input(label, value.detach().clone() if _is_written(row) else value, _state(value))
        elif type(value) in (int, float) and str(row.type) in _NUMBERS and value != row.default_value:
            number = float(value)
            yield _Input(label, number, state_of(abs(number), abs(number)))


def _is_given(output: Tensor, inputs: list[_Input]) -> bool:
    """Whether an output is a view of one of the inputs."""
    storage = _storage(output)
    return any(isinstance(one.value, Tensor) and _storage(one.value) == storage for one in inputs)


def _values(value: Tensor) -> Tensor:
    """The numbers of a tensor of any layout."""
    value = value.detach()
    if value.is_nested:
        value = value.values()
    elif value.layout is torch.sparse_coo:
        value = value._values()
    elif value.layout is not torch.strided:
        value = value.values()
    return value.to(torch.float32) if value.dtype.is_floating_point and value.dtype.itemsize == 1 else value


def _state(value: Tensor) -> State:
    """FINITE also for what has no numbers that can be bad."""
    if not (value.dtype.is_floating_point or value.dtype.is_complex) or value.is_meta or not value.numel():
        return State.FINITE
    values = _values(value)
    if bool(torch.isfinite(values).all()):
        return State.FINITE
    return State.NAN if bool(torch.isnan(values).any()) else State.INF


def _reading(label: str, kind: Kind, value: Tensor | float) -> Reading:
    if not isinstance(value, Tensor):
        return Reading(label, kind, "float", abs(value), abs(value), state_of(abs(value), abs(value)))
    dtype = dtype_name(value.dtype)
    values = _values(value)
    if not values.numel():
        return Reading(label, kind, dtype, 0.0, 0.0, State.EMPTY)
    is_float = values.dtype.is_floating_point or values.dtype.is_complex
    wide = torch.complex128 if values.dtype.is_complex else torch.float64
    low, high = (float(end) for end in torch.aminmax(values.to(wide).abs()))
    return Reading(label, kind, dtype, low, high, state_of(low, high) if is_float else State.NOT_FLOAT)


def _operands(func: Any, inputs: list[_Input], output: Tensor) -> tuple[float, ...]:
    """What an operator that works element by element had for its first bad element, one number for each input."""
    is_pointwise = torch.Tag.pointwise in func.tags or _name(func) in ("_to_copy", "copy_")
    tensors = [one.value for one in inputs if isinstance(one.value, Tensor)]
    plain = [value.layout is torch.strided and not value.is_nested for value in [output, *tensors]]
    if not is_pointwise or not all(plain) or any(value.dtype.is_complex for value in [output, *tensors]):
        return ()
    values = _values(output)
    bad = torch.isnan(values)
    if not bool(bad.any()):
        bad = ~torch.isfinite(values)
    at = tuple(bad.nonzero()[0].tolist())
    found = []
    for one in inputs:
        value = one.value
        if isinstance(value, Tensor):
            value = float(_values(value).expand(output.shape)[at].item())
        found.append(value)
    return tuple(found)
