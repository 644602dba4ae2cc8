"""Observes collectives: they change tensors without their version counters, and a sum over ranks can overflow.

A tensor that a collective has written to is measured anew. In a watched forward or backward, a reduction is measured before
and after: that mostly costs nothing, as the modules around it have the same tensors as output and input.

Only collectives called from Python are seen. DDP's run in the backward, in C++; those of DTensor return new tensors.

Each one is also counted, whoever watches: see ``counted.py``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from ..touch.patched import patch
from ..touch.torch_private import never_compile, process_groups
from ..touch.unseen import quietly
from .counted import BARRIERS, COUNTED, WRAPPERS, count, count_ddp, counted, is_ours, meet_groups
from .recorder import Recorder, Reduction
from .tape import Cell

_GATHERS = (
    "broadcast", "reduce", "gather", "scatter", "recv", "recv_anysource", "alltoall", "alltoall_base", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced",
)  # fmt: skip
_REDUCTIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
}
"""Methods of torch's process groups, and the users' names of those that return a sum on each rank. Each version of torch has
some of them."""

_SENDS = ("send",)
_PIPES = ("send", "recv", "recv_anysource")
_SHUFFLES = ("alltoall", "alltoall_base", "all_to_all_single")

FEW = 16
"""A collective on so few elements is about losses, counts and flags: replicas are not kept equal by it."""

FEW_BYTES = 4096
"""The same where they are bytes: what an object was pickled to."""


class Traffic(NamedTuple):
    """How this rank has communicated so far, in calls on more than a few elements from any thread.

    ``is_piped``: with one other rank, as stages of a pipeline do; ``is_shuffled``: each rank with each, as experts do.
    """

    has_talked: bool = False
    is_piped: bool = False
    is_shuffled: bool = False


_listeners: weakref.WeakSet[Collectives] = weakref.WeakSet()
_hearing: tuple[weakref.ReferenceType[Collectives], ...] = ()
"""The same: to go through a WeakSet takes longer than to count a call."""


class Collectives:
    """Tells a recorder about the collectives of the watched thread, until ``remove``.

    Args:
        guard: makes a function that catches the errors of its body.
        is_watched: whether the calling thread runs a watched forward or backward, or is between the two.
        is_measured: whether its tensors are measured now.
    """

    def __init__(
        self,
        recorder: Recorder,
        guard: Callable[[Callable[..., None]], Callable[..., None]],
        *,
        is_watched: Callable[[], bool],
        is_measured: Callable[[], bool],
    ) -> None:
        self._recorder = recorder
        self._is_measured = is_measured
        self.is_watched = is_watched
        self.begin = guard(self._begin)
        self.end = guard(self._end)
        self.talk = guard(self._talk)
        self.reductions = 0
        """The number of reductions so far."""
        self.exchanges = 0
        """The number of collectives on more than a few elements in what is watched."""
        self.called = 0
        """The number of collectives in what is watched."""
        self.traffic = Traffic()
        count_collectives()
        _listeners.add(self)
        _hear()

    def remove(self) -> None:
        _listeners.discard(self)
        _hear()

    def hears(self, method: str) -> bool:
        """Whether a call of this method may change ``traffic``."""
        return self.traffic != self._traffic_with(method)

    def _talk(self, method: str, args: tuple[Any, ...]) -> None:
        if any(tensor.numel() > (FEW_BYTES if tensor.dtype is torch.uint8 else FEW) for tensor in _tensors(args)):
            self.traffic = self._traffic_with(method)

    def _traffic_with(self, method: str) -> Traffic:
        _, is_piped, is_shuffled = self.traffic
        return Traffic(True, is_piped or method in _PIPES, is_shuffled or method in _SHUFFLES)

    def _begin(self, call: _Operation) -> None:
        self.called += 1
        self.reductions += bool(call.name)
        self.exchanges += any(tensor.numel() > FEW for tensor in call.given)
        if call.name and self._is_measured():
            call.parts = [self._recorder.cell(tensor) for tensor in call.given]
        self._recorder.forget_changed(call.written)

    def _end(self, name: str, parts: list[Cell], written: list[Tensor]) -> None:
        """The collective has written; on a device, as far as the current stream is concerned."""
        self._recorder.forget_changed(written)
        if parts and written:
            self._recorder.reductions.append(Reduction(name, parts, [self._recorder.cell(tensor) for tensor in written]))


class _Operation:
    """A reduction or another collective, seen by one listener. ``name`` is empty if it is no reduction."""

    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self.name = _REDUCTIONS.get(method, "")
        self.written = list(_tensors(args[:1])) if method not in _SENDS else []
        self.given = list(_tensors(args[1:2])) or self.written  # without an input of its own, it works in place
        self.parts: list[Cell] = []


class _Started(NamedTuple):
    """A collective whose work was not waited for yet. It must not keep tensors alive that the training has dropped."""

    listener: weakref.ReferenceType[Collectives]
    name: str
    parts: list[Cell]
    written: list[weakref.ReferenceType[Tensor]]


_started: weakref.WeakKeyDictionary[Any, list[_Started]] = weakref.WeakKeyDictionary()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _hear() -> None:
    global _hearing
    _hearing = tuple(map(weakref.ref, _listeners))


_are_wrapped = False


def count_collectives() -> None:
    """Wraps methods of torch's process groups, once for the process, and counts from now on."""
    global _are_wrapped
    if process_groups is None or _are_wrapped:
        return
    _are_wrapped = True
    meet_groups()
    for method in (*_GATHERS, *_REDUCTIONS, *_SENDS):
        patch(process_groups.ProcessGroup, method, functools.partial(_observed, method))
    for method in BARRIERS:
        patch(process_groups.ProcessGroup, method, functools.partial(counted, method))
    patch(process_groups.Work, "wait", _awaited)
    count_ddp()


def _observed(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    rule = COUNTED.get(method)

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours():
            return original(self, *args, **kwargs)
        if rule is not None:
            count(rule, self, args, kwargs)
        everyone = [one for one in [listener() for listener in _hearing] if one is not None]
        for listener in everyone:
            if listener.hears(method) and self.size() > 1:
                quietly(listener.talk, method, args)
        listeners = [listener for listener in everyone if listener.is_watched()]
        if not listeners:
            return original(self, *args, **kwargs)
        calls = [(listener, _Operation(method, args)) for listener in listeners]
        for listener, call in calls:
            quietly(listener.begin, call)
        work = original(self, *args, **kwargs)
        for listener, call in calls:
            if work is None:  # it was waited for
                quietly(listener.end, call.name, call.parts, call.written)
            else:
                written = [weakref.ref(tensor) for tensor in call.written]
                _started.setdefault(work, []).append(_Started(weakref.ref(listener), call.name, call.parts, written))
        return work

    WRAPPERS.add(observed.__code__)
    never_compile(observed)
    return observed


def _awaited(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for started in _started.pop(self, ()) if _started else ():
            listener = started.listener()
            if listener is not None and listener in _listeners:
                written = [tensor for tensor in (reference() for reference in started.written) if tensor is not None]
                quietly(listener.end, started.name, started.parts, written)
        return result

    never_compile(wait)
    return wait
