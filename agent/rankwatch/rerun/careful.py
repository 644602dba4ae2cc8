"""Runs a forward again without harm: nothing communicates, and nothing that was there before is changed.

``Careful`` is the dispatch mode that stops a forward before an operator that would. ``untouched`` restores what a forward
changes without operators, and ``same_surroundings`` what it finds around it.
"""

from __future__ import annotations

import collections
import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..measure.recorder import Call
from ..measure.walk import leaves
from ..touch.parts import buffers_in, modules_in, parameters_in
from ..touch.torch_private import NORMS_WITH_STATISTICS, is_transformed, keeping_version, modes
from .arguments import storage_of, written
from .limit import Limit

MAX_OPERATORS = 100_000

_COMMUNICATES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "fsdp", "_dtensor")
_SHARDS = ("FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel", "DeepSpeedEngine")
_COMMUNICATORS = ("deep_ep", "nvshmem", "mori", "pplx_kernels", "mpi4py")
"""Packages whose objects communicate by no operator that a mode sees."""


MAX_KEPT = 256 * 2**20
"""Bytes of a kept tensor that is copied before it is written to."""


class Stopped(BaseException):
    """Ends a forward that is run again. Not an Exception, which a user's forward may catch."""


class Careful(TorchDispatchMode):
    """Stops a forward before an operator that communicates, changes what is not its own, or comes too late.

    Args:
        buffers: the tensors that may be changed.
        limit: when it stops. None: never.
        wanted: whether anybody still waits for what is found.
    """

    runs_again = True
    """See ``touch.unseen``."""

    def __init__(
        self, buffers: Sequence[Tensor] = (), limit: Limit | None = None, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stopped = ""
        self.is_late = False
        """Whether it stopped because of the time."""
        self.came_to_collective = False
        self.count = 0
        self.largest = 0
        """The bytes that the largest operator read and wrote."""
        self.made = 0
        """The bytes that all operators made."""
        self.left: Callable[[nn.Module | str, Call], None] | None = None
        """Called with each watched module that returns, and its call; with each label of a marked tensor, as an output."""
        self.module: nn.Module | None = None
        """The module whose forward is run again."""
        self._limit = limit or Limit()
        self._wanted = wanted
        self._ours = {storage_of(value) for value in buffers}
        """The storages that may be written to."""
        self._kept: dict[int, tuple[str, Tensor]] = {}
        """By storage, the plain tensors that the modules keep, as a cache of keys: they may be written to, and are put back."""
        self._before: list[tuple[str, Tensor, Tensor]] = []
        """Those that were written to, as bytes, with copies of what they were."""
        self._versions = ExitStack()

    supports_higher_order_operators = True

    def __enter__(self) -> Any:
        in_any_thread.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        in_any_thread.remove(self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler here, for seconds

    def check(self) -> None:
        if self.stopped:
            raise Stopped(self.stopped)

    # The engine calls these five. A mode that does more than to stop a forward has its own.

    def given(self, values: Any) -> Any:
        """What the forward is given in the place of its args and kwargs."""
        return values

    def kernels(self) -> AbstractContextManager[None]:
        """The kernels that torch may use meanwhile."""
        return nullcontext()

    def prepare(self, module: nn.Module) -> None:
        """Called before the forward of the module, whose attributes are restored after it."""

    def keep(self, module: nn.Module) -> None:
        """Has the plain tensors that the modules keep put back by ``put_back``, where the forward writes to them."""
        weights = {storage_of(value) for value in parameters_in(module)}
        found = {storage_of(value): (name, value) for name, value in _kept_by(module)}
        self._kept = {storage: one for storage, one in found.items() if storage not in weights}

    def put_back(self, changes: Altered) -> None:
        with torch.no_grad():
            for name, value, before in self._before:
                if not torch.equal(value, before):
                    value.copy_(before)
                    changes.names.append(name)
        self._before.clear()
        self._versions.close()

    def _may_write(self, value: Tensor) -> bool:
        storage = storage_of(value)
        if storage not in self._ours and storage in self._kept:
            name, kept = self._kept[storage]
            if kept.untyped_storage().nbytes() <= MAX_KEPT:
                memory = torch.empty(0, dtype=torch.uint8, device=kept.device).set_(kept.untyped_storage())
                self._versions.enter_context(keeping_version(kept))
                self._before.append((name, memory, memory.clone()))
                self._ours.add(storage)
        return storage in self._ours

    def turn(self) -> None:
        """Called between the forward and its backward."""

    def in_place_of(self, parameter: Tensor) -> Tensor:
        """What the forward has in the place of a parameter, once it is prepared."""
        return parameter

    def stop(self, why: str) -> None:
        self.stopped = self.stopped or why
        self.check()

    def guard(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises ``Stopped`` if the operator must not run, and in each operator after that."""
        self.count += 1
        if self.communicates(func):
            self.came_to_collective = True
            self.stopped = self.stopped or f"it communicates by {func}"
        elif self.count > MAX_OPERATORS:
            self.stopped = self.stopped or f"it has more than {MAX_OPERATORS} operators"
        elif self._limit.is_reached():
            self.is_late = self.is_late or not self.stopped
            self.stopped = self.stopped or "it takes too long"
        elif not self._wanted():
            self.stopped = self.stopped or "the run has ended meanwhile"
        elif not all(map(self._may_write, written(func, args, kwargs))):
            self.stopped = self.stopped or f"{func} changes a tensor that is not its own"
        self.check()

    @staticmethod
    def communicates(func: Any) -> bool:
        return getattr(func, "namespace", "") in _COMMUNICATES

    def own(self, outputs: Sequence[Tensor], given: Sequence[Any]) -> None:
        """The outputs of an operator may be changed, unless they are views of what it was given."""
        known = {storage_of(value) for value in given if isinstance(value, Tensor)}
        self._ours |= {storage_of(value) for value in outputs} - known
        self.made += sum(_bytes(value) for value in outputs if storage_of(value) not in known)
        self.largest = max(self.largest, sum(_bytes(value) for value in (*outputs, *given) if isinstance(value, Tensor)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.guard(func, args, kwargs)
        result = func(*args, **kwargs)
        self.own(tensors(result), [leaf for _, leaf in leaves([args, kwargs], "")])
        return result


in_any_thread: list[Careful] = []
"""The modes of the forwards that are run again now."""


def is_run_again(root: nn.Module) -> bool:
    """Whether a forward of this model is run again now, in any thread."""
    return bool(_inside(root))


def stop_again(root: nn.Module) -> None:
    """Stops the forwards of this model that are run again now: they have started the calling thread."""
    for mode in _inside(root):
        mode.stopped = mode.stopped or "it runs its modules in threads of its own"


def _inside(root: nn.Module) -> list[Careful]:
    return [mode for mode in in_any_thread if any(mode.module is inner for inner in modules_in(root))]


def running_again() -> Careful | None:
    """The mode of the forward that is run again, if the calling code runs in one."""
    return next((mode for mode in modes() if isinstance(mode, Careful)), None)


def passed_again(key: nn.Module | str, call: Call) -> bool:
    """Tells a forward that is run again, if there is one, what the calling code has come to. Returns whether there is one."""
    mode = running_again()
    if mode is not None and mode.left is not None:
        mode.left(key, call)
    return mode is not None


def tensors(values: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(values, "") if isinstance(leaf, Tensor)]


def _bytes(value: Tensor) -> int:
    try:
        return value.numel() * value.element_size()
    except RuntimeError:  # a nested tensor of an unknown size, say
        return 0


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected for a while: a full collection takes longer than a forward may that is run again.

    It takes 0.3 s of CPU time with torch alone in memory, and seconds in a training with many objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- what must not be run again --------------------------------------------------------------------------------------


def refusal(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Why a forward must not be run again: it might communicate unseen by the mode, or is not the same code. Empty: it may."""
    if is_transformed():
        return "it runs inside a transformation of torch.func"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    for inner in modules_in(module):
        names = {cls.__name__ for cls in type(inner).__mro__}
        if not names.isdisjoint(_SHARDS):
            found = next(name for name in _SHARDS if name in names)
            return f"{found} inside of it communicates" if inner is not module else f"it communicates ({found})"
        if any(type(value).__module__.partition(".")[0] in _COMMUNICATORS for value in vars(inner).values()):
            return f"{type(inner).__name__} communicates by a library that torch does not see"
        if is_compiled(inner) and not hasattr(torch.compiler, "set_stance"):
            return "it is compiled, and this release of torch cannot run it eagerly"
    given = [*tensors(list(args)), *tensors(dict(kwargs)), *parameters_in(module), *buffers_in(module)]
    if any(hasattr(value, name) for value in given for name in ("to_local", "ds_id", "_fsdp_flattened")):
        return "its tensors are sharded: computing with them communicates"
    return ""


def is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def runs_compiled(module: nn.Module, root: nn.Module) -> bool:
    """Whether a module of the root, one below it, or one around it runs compiled."""
    compiled = [one for one in modules_in(root) if is_compiled(one)]
    return bool(compiled) and (
        any(is_compiled(one) for one in modules_in(module))
        or any(module is inner for one in compiled for inner in modules_in(one))
    )


# --- what is restored ------------------------------------------------------------------------------------------------


@dataclass
class Altered:
    """What a forward that was run again had changed, and was restored. It tells whether it was the same forward twice."""

    names: list[str] = field(default_factory=list)
    """Attributes and buffers that the module reads, perhaps."""
    drew: bool = False
    """Whether it drew random numbers of torch."""
    drew_others: bool = False
    """Whether it drew random numbers of Python or NumPy."""


@contextmanager
def untouched(module: nn.Module, changes: Altered) -> Iterator[None]:
    """Restores the buffers and attributes of a module and of those below it, and the gradients of its parameters.

    The training may go on: a forward has saved buffers for its backward, which refuses a buffer with another version.
    """
    with ExitStack() as stack:
        for value in buffers_in(module):
            stack.enter_context(keeping_version(value))
        with _restored(module, changes):
            yield


@contextmanager
def _restored(module: nn.Module, changes: Altered) -> Iterator[None]:
    inner = list(modules_in(module))
    attributes = [(one, dict(vars(one))) for one in inner]
    containers = [
        (name, value, _copied(value))
        for _, known in attributes
        for name, value in known.items()
        if type(value) in _CONTAINERS
    ]
    buffers = [
        (one, name, value, value.detach().clone())
        for one in inner
        for name, value in one._buffers.items()
        if value is not None and not value.is_meta
    ]
    gradients = [(value, value.grad) for value in parameters_in(module) if value.is_leaf]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, name, value, before in buffers:
                one._buffers[name] = value
                if not torch.equal(value, before):  # batch_norm writes without a new version
                    if not isinstance(one, NORMS_WITH_STATISTICS) and not _is_equal(value, before):
                        changes.names.append(name)  # in training mode, norms do not read theirs
                    value.copy_(before)
        for name, value, before in containers:
            if _differs(value, before):
                _put_back(value, before)
                if name not in _TORCH_OWN:
                    changes.names.append(name)
        for one, known in attributes:
            now = vars(one)
            changed = [name for name in {**now, **known} if now.get(name, _ABSENT) is not known.get(name, _ABSENT)]
            if changed:
                changes.names += [name for name in changed if not _is_same_number(now.get(name), known.get(name))]
                now.clear()
                now.update(known)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_TORCH_OWN = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
_ABSENT = object()


def _kept_by(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors in the attributes of a module and of those below it."""
    for inner in modules_in(module):
        for name, value in vars(inner).items():
            if name not in _TORCH_OWN:
                held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
                yield from ((name, one) for one in held if type(one) is Tensor and one.layout is torch.strided)


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, (list, collections.deque)) else value.copy()


def _differs(value: Any, before: Any) -> bool:
    if len(value) != len(before):
        return True
    if isinstance(value, dict):
        return any(value.get(key, _ABSENT) is not one for key, one in before.items())
    if isinstance(value, set):
        return bool(value != before)
    return any(one is not other for one, other in zip(value, before, strict=True))


def _put_back(value: Any, before: Any) -> None:
    value.clear()
    (value.update if isinstance(value, (dict, set)) else value.extend)(before)


def _is_same_number(now: Any, before: Any) -> bool:
    return type(now) is type(before) and isinstance(now, (int, float, str, bool)) and now == before


def _is_equal(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same where they are numbers."""
    return value.dtype.is_floating_point and torch.equal(value.nan_to_num(), other.nan_to_num())


@contextmanager
def same_surroundings(
    module: nn.Module, args: Any, kwargs: Any, changes: Altered, entry: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Random state restored; autocast without its cache of weights, which would hide their casts; nothing compiled.

    ``entry`` puts the random state, autocast and so on back to what they were as the forward began.
    """
    given = [*parameters_in(module), *buffers_in(module), *tensors([args, kwargs])]
    devices = sorted({value.device.index or 0 for value in given if value.device.type == "cuda"})
    had_cache = torch.is_autocast_cache_enabled()
    others = _other_random_states()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # A checkpoint around it counts what the forward saves for the backward.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value))
        stack.enter_context(entry or nullcontext())
        torch.set_autocast_cache_enabled(False)
        before = _random_state(devices)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(had_cache)
            changes.drew = not all(map(torch.equal, before, _random_state(devices)))
            changes.drew_others = _put_other_random_states_back(others)


def _random_state(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in devices)]


def _other_random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), numpy.get_state() if numpy is not None else None


def _put_other_random_states_back(before: tuple[Any, Any]) -> bool:
    """Returns whether they had changed."""
    now = _other_random_states()
    drew = now[0] != before[0]
    random.setstate(before[0])
    if before[1] is not None:
        drew |= not all(map(_is_alike, now[1], before[1]))
        sys.modules["numpy.random"].set_state(before[1])
    return bool(drew)


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two values, or two arrays, are equal."""
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
