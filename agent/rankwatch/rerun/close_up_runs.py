"""The close-up: after the TRIP is sent, runs the forward that tripped again. Does it recur, and in which precision is it finite?

It is bounded in time and memory, and an error in it is a line in the report.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.extremes import dtype_name
from ..shared.types.closeup import CloseUp, Precision
from ..shared.types.frame import Kind, State
from ..shared.types.trip import Operator
from ..touch.parts import buffers_in, modules_in, parameters_in
from ..touch.torch_private import without_modes
from .arguments import reading_of, state_of_tensor, storage_of
from .backward_rerun import RootRun
from .capsule.capsule import CapsuleWritten
from .capsule.gpu_name import describe_gpus
from .careful import Careful, tensors, uncollected
from .engine import Ran, Rerun, describe_error
from .forward import Forward
from .limit import Limit
from .repetition import UNKNOWN, Repeated, repeat

log = logging.getLogger(__name__)

RUNS = 3
"""The forward is run again this often; the repetition before the TRIP is the first time."""

SWITCH_INTERVAL = 0.0005
"""Python's, meanwhile: the thread that talks to the collector acknowledges the abort."""

_CGROUP = Path("/sys/fs/cgroup")

WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Subject:
    """What a close-up looks at: the forwards that can be run again, and what the repetition before the TRIP found.

    ``was_given``: the operator that it found only read what was bad before. ``note`` is why there is nothing to run.
    ``output`` is what was bad, if it is at hand.
    """

    forwards: Sequence[Forward] = ()
    forward: Forward | None = None
    repeated: Repeated = UNKNOWN
    was_given: bool = False
    is_compiled: bool = False
    note: str = ""
    output: Any = None
    again: RootRun | None = None
    """Of a gradient: the forward of the root whose backward is run again."""


NOTHING = Subject()


Keep = Callable[[Forward, float], CapsuleWritten]
"""Writes the capsule of a forward, until then by ``time.monotonic``."""


@uncollected()
def look_closer(
    subject: Subject,
    seconds: float,
    wanted: Callable[[], bool],
    name: Callable[[nn.Module], str],
    keep: Keep | None = None,
) -> CloseUp:
    """The close-up, within ``seconds``.

    Args:
        wanted: whether anybody still waits for it.
        name: the name of a module.
        keep: None: no capsule is wanted.
    """
    until = time.monotonic() + seconds
    look = _Look(subject, until, wanted, name)
    found = CloseUp()
    steps: list[Callable[[CloseUp], CloseUp]] = [lambda _: look.all()]
    if keep is not None:
        steps.append(lambda found: _kept(found, look, keep, until) if wanted() else found)
    steps.append(lambda found: replace(found, machine=_machine(subject.forwards)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        for step in steps:
            try:
                found = step(found)
            except Exception as error:
                log.debug("a part of the close-up failed", exc_info=True)
                found = _noted(found, describe_error(error))
    finally:
        sys.setswitchinterval(before)
    return found


def _was_bad_before(given: Tensor, reader: Operator | None, module: nn.Module, name: Callable[[nn.Module], str]) -> str:
    """Names what was bad before the forward of ``module``. Of a buffer also what read it first, as the read may be the fault."""
    state = state_of_tensor(given).word
    if weight := next(_names(given, module, "_parameters", name), ""):
        return f"the weight {weight} was already {state}"
    buffer = next(_names(given, module, "_buffers", name), "")
    if not buffer:
        return f"the input was already {state}"
    was = f"the buffer {buffer} was already {state}"
    if reader is None:
        return was
    at = f" at {reader.source.file.rpartition('/')[2]}:{reader.source.line}" if reader.source is not None else ""
    return f"{was}; {reader.title}{at} read it first"


def _names(value: Tensor, module: nn.Module, table: str, name: Callable[[nn.Module], str]) -> Iterator[str]:
    """A value's names in these tables of the module, within the whole model: another forward of it has the same names."""
    for owner in modules_in(module):
        for label, one in getattr(owner, table).items():
            if one is not None and storage_of(one) == storage_of(value):
                yield ".".join(filter(None, (name(owner), label)))


def _noted(found: CloseUp, note: str) -> CloseUp:
    return replace(found, note="; ".join(filter(None, (found.note, note))))


def _machine(forwards: Sequence[Forward]) -> str:
    given = [value for one in forwards for value in (*tensors([one.args, one.kwargs]), *parameters_in(one.module))]
    return describe_gpus({value.device for value in given})


def _kept(found: CloseUp, look: _Look, keep: Keep, until: float) -> CloseUp:
    """With the capsule of the forward, or why there is none."""
    forward = look.forward
    if forward is None:  # the note says why it was not run again
        return _noted(found, "so there is no capsule")
    if forward.refusal or look.communicates:
        return found
    written = (_keep_inner(forward, keep, until) if look.is_inner else None) or keep(forward, until)
    if written.path is not None:
        return replace(found, capsule=str(written.path))
    return _noted(found, f"capsule: {written.why_not}")


def _keep_inner(forward: Forward, keep: Keep, until: float) -> CapsuleWritten | None:
    """Writes the capsule of ``forward.inner``, a module inside of a forward; None if the module was not called again.

    The root's capsule may be larger than the disk. Where the numbers are judged at the end of a batch, the module's own inputs
    are gone. So the root's forward runs once more until it calls the module. What it gives the module then is written, with the
    random state and autocast of that moment.
    """
    inner, calls = forward.inner, 0
    found: list[CapsuleWritten] = []
    mode = Careful([*buffers_in(forward.module)], Limit(until))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == forward.nth:
            with without_modes():
                found.append(keep(Forward(module, args, kwargs, forward.label), until))
            mode.stop("the capsule is written")

    assert isinstance(inner, nn.Module)
    handle = inner.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        Rerun(forward, mode).forward(grad=forward.entry is None or forward.entry.has_gradients)
    finally:
        handle.remove()
    return found[0] if found else None


class _Look:
    def __init__(self, subject: Subject, until: float, wanted: Callable[[], bool], name: Callable[[nn.Module], str]) -> None:
        self.forward = subject.forward or next(iter(subject.forwards), None)
        """The forward that was bad again, or whose backward was."""
        if subject.again is not None:
            self.forward = subject.again.forward
        self.is_inner = False
        """Whether it was bad by an operator of the module inside of it alone."""
        self._subject = subject
        self._until = until
        self._wanted = wanted
        self._name = name
        self.communicates = subject.repeated.communicates
        """Whether the forward comes to a collective: it cannot be run elsewhere."""
        self._took = 0.0
        """The seconds of the longest rerun here."""
        self._needed = 0
        """The bytes that it needs at once, at least."""
        self._notes: list[str] = []

    def all(self) -> CloseUp:
        subject, forward = self._subject, self._subject.forward
        repeated = subject.repeated
        if subject.again is not None:
            return self._runs_of(subject.again.forward, subject.again.again, repeated)
        if forward is None:
            return CloseUp(note=subject.note)
        if subject.was_given or (repeated.is_late and repeated.recurred is None):
            repeated, forward = self._look_around(repeated, forward)
            self.forward = forward or self.forward
        if forward is None:
            return CloseUp(operator=self._operator(repeated), note=repeated.note)
        if repeated.recurred is None:
            return CloseUp(operator=self._operator(repeated), note=f"not run again: {repeated.note}")
        self.is_inner = isinstance(forward.inner, nn.Module) and forward.inner in repeated.modules and repeated.given is None
        return self._runs_of(forward, lambda mode: Rerun(forward, mode).forward(grad=repeated.grad), repeated)

    def _runs_of(self, forward: Forward, rerun: Callable[[Careful], Ran[Any]], repeated: Repeated) -> CloseUp:
        """How often it is bad again, and in which precision it is finite. The repetition before was the first rerun."""
        buffers = [*buffers_in(forward.module)]
        recurred, of = int(bool(repeated.recurred)), 1
        while of < RUNS and self._has_time():
            values = self._run(rerun, Careful(buffers, Limit(self._until), self._wanted), forward.module)
            if values is None:
                break
            of += 1
            recurred += any(state_of_tensor(value) is not State.FINITE for value in values)
        precision = tuple(self._precisions(rerun, forward.module)) if recurred else ()
        return CloseUp(
            operator=self._operator(repeated),
            recurred=recurred,
            of=of,
            precision=precision,
            note="; ".join(dict.fromkeys(self._notes)),
            is_eager=self._subject.is_compiled,
        )

    def _operator(self, repeated: Repeated) -> Operator | None:
        operator = repeated.operator
        if operator is None or (repeated.given is not None and self._subject.was_given):
            return None
        culprit = self._subject.forward and self._subject.forward.inner
        found = next(((module, name) for module in repeated.modules if (name := self._name(module))), None)
        return replace(operator, module=found[1] if found is not None and found[0] is not culprit else "")

    def _look_around(self, repeated: Repeated, forward: Forward) -> tuple[Repeated, Forward | None]:
        """What the module was given was bad before: looks for its origin in the root's forward. Or there was no time before."""
        around = [one for one in self._subject.forwards if one is not forward] if self._subject.was_given else [forward]
        found, which = repeat(around, Limit(self._until), self._wanted) if around else (repeated, None)
        if not self._subject.was_given or (found.recurred and found.operator is not None and found.given is None):
            return found, which
        note = found.note
        if not note and repeated.given is not None and forward is not None:
            note = _was_bad_before(repeated.given, repeated.operator, forward.module, self._name)
        return repeated._replace(operator=None, note=note), None

    def _has_time(self) -> bool:
        """Whether another forward fits in the time that is left. If not, the note says so."""
        if not self._wanted():
            return False
        has_time = time.monotonic() + self._took < self._until
        if not has_time:
            self._notes.append(f"no time for more: one forward takes {self._took:.2g} s")
        return has_time

    def _run(self, rerun: Callable[[Careful], Ran[Any]], mode: Careful, module: nn.Module) -> list[Tensor] | None:
        """What another rerun makes; None if it failed, and then the note says why."""
        start = time.monotonic()
        ran = rerun(mode)
        if ran.values is None:
            self._notes.append(f"stopped: {ran.note}" if ran.was_stopped else ran.note)
            return None
        self._took = max(self._took, time.monotonic() - start)
        needed = mode.largest
        if self._subject.again is not None:
            # A backward needs all that the forward made, and the gradients of the parameters.
            needed = (mode.made + 2 * sum(value.numel() * value.element_size() for value in parameters_in(module))) // 4
        self._needed = max(self._needed, needed)
        return [value for value in ran.values if value is not None]

    def _precisions(self, rerun: Callable[[Careful], Ran[Any]], module: nn.Module) -> Iterator[Precision]:
        for dtype in WIDE:
            if not self._has_time() or not self._has_memory(dtype, module):
                return
            outputs, kernels = self._run_wide(rerun, dtype, module)
            if outputs is None or any(_is_wider(value.dtype, dtype) for value in outputs):
                continue  # it failed, or is computed in a wider dtype anyway
            readings = [reading_of("output", Kind.OUTPUT, value) for value in outputs if value.numel()]
            state = max((one.state for one in readings if one.state in (State.NAN, State.INF)), default=State.FINITE)
            if state is not State.FINITE and not kernels:
                self._blame_kernel(rerun, dtype, module, state)
            highest = max((one.abs_max for one in readings), default=0.0)
            yield Precision(dtype_name(dtype), state, highest if state is State.FINITE else 0.0)

    def _run_wide(
        self,
        rerun: Callable[[Careful], Ran[Any]],
        dtype: torch.dtype,
        module: nn.Module,
        only: tuple[str, ...] | None = None,
    ) -> tuple[list[Tensor] | None, tuple[str, ...]]:
        """What a wide forward makes, and the kernels that were replaced; ``only``: in this way of replacing them."""
        from .wider import Wider, ways

        notes, is_backward = list(self._notes), self._subject.again is not None
        tried = ways(has_backward=is_backward)
        for way in tried if only is None else [one._replace(kernels=only) for one in tried if not one.kernels]:
            buffers, limit = [*buffers_in(module)], Limit(self._until)
            mode = Wider(dtype, buffers, limit, self._wanted, way=way, with_gradients=is_backward)
            outputs = self._run(rerun, mode, module)
            if outputs is not None:
                self._notes = notes
                return outputs, way.kernels
            if mode.stopped:
                break
        self._notes = [*notes, f"in {dtype_name(dtype)}: {self._notes[-1]}"]
        return None, ()

    def _blame_kernel(
        self, rerun: Callable[[Careful], Ran[Any]], dtype: torch.dtype, module: nn.Module, state: State
    ) -> None:
        """A wide forward is bad as well: a plain kernel in the place of a fused one may make it finite."""
        from .wider import kernels_of

        operator = self._subject.repeated.operator
        for kernel in kernels_of(operator.name if operator is not None else ""):
            notes = list(self._notes)
            outputs = self._run_wide(rerun, dtype, module, (kernel,))[0] if self._has_time() else None
            self._notes = notes
            if outputs is not None and all(state_of_tensor(value) is State.FINITE for value in outputs):
                name = dtype_name(dtype)
                self._notes.append(f"in {name} it is {state.word} by {kernel}, and finite by the plain kernels of torch")
                return

    def _has_memory(self, dtype: torch.dtype, module: nn.Module) -> bool:
        """Whether the largest operator fits in a wider dtype, several times over."""
        free = _free_memory(module)
        has_memory = free is None or 4 * self._needed * dtype.itemsize / 2 < free
        if not has_memory:
            self._notes.append(f"not run in {dtype_name(dtype)}: too little memory is free")
        return has_memory


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    size = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    return dtype.is_floating_point and size > other.itemsize


def _free_memory(module: nn.Module) -> float | None:
    """The bytes that are free where a module runs; None if that is not known."""
    device = next((value.device for value in parameters_in(module)), torch.device("cpu"))
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    found = []
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        found.append(1024.0 * int(line.split()[1]))
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        found += [float(limit) - float(used)] if limit != "max" else []
    except (OSError, StopIteration):
        log.debug("the free memory is not known", exc_info=True)
    return min(found, default=None)
