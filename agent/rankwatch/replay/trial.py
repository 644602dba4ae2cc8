"""A capsule -> its forward, and backward, again: as in the training, on another device, in another precision, or of some rows."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..rerun.backward_rerun import RootRun
from ..rerun.capsule.tensor_file import digest_of
from ..rerun.careful import Careful, passed_again, tensors
from ..rerun.engine import Ran, Rerun
from ..rerun.forward import Forward, RootEntry
from ..rerun.limit import Limit
from ..rerun.wider import Way, Wider, ways
from ..shared.types.frame import State, state_of
from ..touch.parts import buffers_in, parameters_in
from .call import Call, as_in_training, has_autocast, make_call, moved
from .code import UsersCode
from .opened import OpenedCapsule

CPU = torch.device("cpu")


class ForwardResult(NamedTuple):
    """What a forward returned, or the gradients of its backward. ``error``: it raised instead, or ran out of memory."""

    state: State
    abs_max: float
    digest: str
    error: str = ""

    @property
    def is_bad(self) -> bool:
        return self.state in (State.INF, State.NAN)


_EMPTY = ForwardResult(State.EMPTY, 0.0, "")


class Trial:
    """Runs the forward of a capsule, as the close-up does. ``make``: see ``make_call``."""

    def __init__(self, capsule: OpenedCapsule, code: UsersCode, make: Callable[[], nn.Module] | None = None) -> None:
        self._capsule = capsule
        self._code = code
        self._make = make
        self.drawn: list[str] = []
        self.draws = False
        """Whether the forward drew random numbers."""

    def call(self, device: torch.device = CPU, change: Callable[[Call], Call] = lambda call: call) -> Call:
        """The module and its inputs as they were, on this device; then ``change`` changes them."""
        call = make_call(self._capsule, self._code, device, self._make)
        self.drawn = list(call.drawn)
        return change(call)

    def surrounded(
        self, device: torch.device, autocast: torch.dtype | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Flags, modes and random state as in the training. ``autocast``: to this dtype, if it was on."""
        return as_in_training(self._capsule, device, autocast)

    def forward(self, call: Call) -> Forward:
        """The forward that tripped."""
        manifest, inner = self._capsule.manifest, self._capsule.manifest["inner"]
        if inner is None:
            return Forward(call.module, call.args, call.kwargs, manifest["label"])
        module = call.module.get_submodule(inner["name"])
        module.register_forward_hook(_pass)
        return Forward(call.module, call.args, call.kwargs, manifest["label"], module, inner["nth"])

    def root_run(self, call: Call) -> RootRun:
        """The forward whose backward tripped, with what the backward was handed. Within ``surrounded``."""
        return RootRun(RootEntry(call.module, call.args, call.kwargs), None, gradients=call.gradients)

    def run(
        self, device: torch.device, change: Callable[[Call], Call] = lambda call: call, dtype: torch.dtype | None = None
    ) -> ForwardResult:
        """Runs a forward; in another precision, if ``dtype`` is given."""
        own = own_dtype(self.call()) if dtype is not None else None
        # Its own dtype counts as wider: what the forward casts to a narrower one stays wide.
        is_wider = dtype is not None and own is not None and (dtype == own or dtype.itemsize > own.itemsize)
        # Of 16 bits, it takes the place of the dtype to which autocast has cast.
        autocast = dtype if dtype is not None and dtype.itemsize == 2 and has_autocast(self._capsule) else None
        is_cast_anyway = autocast is not None and own is not None and own.itemsize > 2
        if dtype is not None and not is_wider and not is_cast_anyway:  # the module and its inputs are cast
            change = functools.partial(moved, device=device, dtype=dtype)
        found = ways(has_backward=bool(self._capsule.manifest["gradients"])) if is_wider else [None]
        for place, way in enumerate(found, 1):
            try:
                ran = self._rerun(device, change, dtype if is_wider else None, way, autocast)
            except UsageError:
                raise
            except Exception as error:  # noqa: BLE001  the module may be too large for this device, say
                if place == len(found):
                    return ForwardResult(State.NONE, 0.0, "", _describe(error))
            else:
                if ran.values is not None:
                    break
        self.draws |= ran.changes.drew
        if ran.values is None:
            return ForwardResult(State.NONE, 0.0, "", ran.note)
        results = [_result(value) for value in ran.values if value is not None and _is_float(value)]
        return max(results, key=lambda one: (one.is_bad, one.state, one.abs_max), default=_EMPTY)

    def _rerun(
        self,
        device: torch.device,
        change: Callable[[Call], Call],
        wide: torch.dtype | None,
        way: Way | None,
        autocast: torch.dtype | None,
    ) -> Ran[Tensor] | Ran[Tensor | None]:
        """The forward again. Or forward and backward: then the values are the gradients of the parameters."""
        call = self.call(device, change)
        buffers, has_backward = [*buffers_in(call.module)], bool(call.gradients)
        # A forward here may change what it was given, which no training needs any more.
        ours = buffers if has_backward else [*buffers, *parameters_in(call.module), *tensors([call.args, call.kwargs])]
        mode = Careful(ours)
        if wide is not None and way is not None:
            mode = Wider(wide, ours, Limit(), lambda: True, way=way, with_gradients=has_backward)
        with self.surrounded(device, autocast):
            if has_backward:
                return self.root_run(call).again(mode)
            grad = self._capsule.manifest["surroundings"]["grad"]
            return Rerun(self.forward(call), mode, describe=_describe).forward(grad=grad)

    def is_as_trained(self, result: ForwardResult) -> bool | None:
        """Whether the bits are those of the training; None: the capsule does not know them."""
        known = {one["sha256"] for one in self._capsule.manifest["outputs"]}
        return result.digest in known if known else None


def _describe(error: Exception) -> str:
    """What a forward raised; what to do about it where it communicates."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(name.startswith("torch.distributed") for name in frames):
        return (
            f"{text} It uses torch.distributed, and a replay is one process without a process group: look at the operator in the "
            "report, or take the communication out of the forward and replay it with the code changed so"
        )
    return text


def _pass(module: nn.Module, args: Any, output: Any) -> None:
    """Tells the forward that is run again that it has come to this module."""
    passed_again(module, (args, {}, output))


# --- rows --------------------------------------------------------------------------------------------------------------


def rows_of(call: Call) -> int:
    """The rows of the batch: the first dimension of the first input that has one; 0 if there is none."""
    return next((len(value) for value in tensors([call.args, call.kwargs]) if value.dim()), 0)


def enough(rows: int, is_bad: Callable[[int, int], bool]) -> tuple[int, int]:
    """The rows that are enough, by halving: from the first to before the second."""
    begin, end = 0, rows
    while end - begin > 1:
        middle = (begin + end) // 2
        if is_bad(begin, middle):
            end = middle
        elif is_bad(middle, end):
            begin = middle
        else:
            break
    return begin, end


def _is_float(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _result(value: Tensor) -> ForwardResult:
    flat = value.detach()
    if not flat.numel():
        return _EMPTY
    largest = float(flat.abs().to(torch.float64).max())
    return ForwardResult(state_of(largest, largest), largest, digest_of(flat) if flat.layout is torch.strided else "")


def dtypes_of(names: Sequence[str]) -> list[torch.dtype]:
    found = [getattr(torch, name, None) for name in names]
    for name, dtype in zip(names, found, strict=True):
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UsageError(f"{name} is no floating dtype of torch: float16, bfloat16, float32 and float64 are")
    return [dtype for dtype in found if dtype is not None]


def own_dtype(call: Call) -> torch.dtype | None:
    """The dtype in which a forward computes, by its first input or parameter; None: it has none."""
    values = [*tensors([call.args, call.kwargs]), *parameters_in(call.module)]
    return next((value.dtype for value in values if _is_float(value)), None)
