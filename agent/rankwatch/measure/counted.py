"""Counts the collectives of this process in its ledger, by what must be alike on all members of a group.

Counted are those that are called from Python, by the wrappers of ``collectives.py``; and what DDP calls in C++, as one call of
its own kind: a backward that reduces gradients, a broadcast of buffers. From torch 2.14 on, process groups tell of each call that
is dispatched (pull request 186300): so all that C++ calls is counted, too, DDP's buckets as well as the collectives of DTensor
and of compiled code. Sends and receives are pairs, and are not counted.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..touch.patched import patch
from ..touch.stack import calling, outwards
from ..touch.torch_private import group_facts, groups_so_far, modes_on, never_compile, process_groups
from ..touch.unseen import runs_in_earnest
from .ledger import KEPT, LEDGER, DistinctCall, MetGroup, Signature
from .walk import outputs_of

log = logging.getLogger(__name__)

_FAULT = "rankwatch: an error of ours as a collective was counted; collectives are counted no more"

NONE = -1

Alike = tuple[int, Any, int, int]
"""Elements, dtype, the number of the reduction, and the root's rank in the group."""


_PLAIN = (int, getattr(getattr(process_groups, "ReduceOp", None), "RedOpType", int))


class CountedMethod:
    """A method of torch's process groups: its name for users, and what of a call must be alike.

    ``sized`` is the place of the tensors whose elements and dtype must be. Lists of tensors may be uneven, and splits.
    ``options``: the place of what has the reduction and the root.
    """

    __slots__ = ("has_op", "has_root", "kind", "options", "sized")

    def __init__(
        self, kind: str, sized: int | None = None, options: int | None = None, *, op: bool = False, root: bool = False
    ) -> None:
        self.kind, self.sized, self.options, self.has_op, self.has_root = kind, sized, options, op, root

    def alike(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Alike, bool]:
        """What must be alike; and whether the tensors are on the host."""
        if self.sized is None:
            numel, dtype, on_host = NONE, None, _is_on_host(args)
        else:
            given = args[self.sized]
            if type(given) is not list:
                numel = given.numel()
            elif len(given) == 1:
                given = given[0]
                numel = given.numel()
            else:
                numel, given = sum([tensor.numel() for tensor in given]), given[0]
            dtype, on_host = given.dtype, given.is_cpu
        place = self.options
        if place is None:
            return (numel, dtype, NONE, NONE), on_host
        options = args[place] if len(args) > place else kwargs.get("opts", 0)
        if type(options) in _PLAIN:  # the process group is called in a way of its own
            op, root = hash(options), int(options)
            return (numel, dtype, op if self.has_op else NONE, root if self.has_root else NONE), on_host
        # The hash of a reduction is its number, which takes three times as long to ask for.
        op, root = hash(options.reduceOp) if self.has_op else NONE, options.rootRank if self.has_root else NONE
        return (numel, dtype, op, root), on_host


COUNTED = {
    "allreduce": CountedMethod("all_reduce", 0, 1, op=True),
    "allreduce_coalesced": CountedMethod("coalesced all_reduce", 0, 1, op=True),
    "broadcast": CountedMethod("broadcast", 0, 1, root=True),
    "reduce": CountedMethod("reduce", 0, 1, op=True, root=True),
    "allgather": CountedMethod("all_gather"),
    "allgather_coalesced": CountedMethod("coalesced all_gather"),
    "_allgather_base": CountedMethod("all_gather_into_tensor", 1),
    "all_gather_single": CountedMethod("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced": CountedMethod("coalesced all_gather_into_tensor", 1),
    "all_gather_single_coalesced": CountedMethod("coalesced all_gather_into_tensor", 1),
    "gather": CountedMethod("gather", None, 2, root=True),
    "scatter": CountedMethod("scatter", None, 2, root=True),
    "reduce_scatter": CountedMethod("reduce_scatter", None, 2, op=True),
    "_reduce_scatter_base": CountedMethod("reduce_scatter_tensor", 1, 2, op=True),
    "reduce_scatter_single": CountedMethod("reduce_scatter_tensor", 1, 2, op=True),
    "reduce_scatter_tensor_coalesced": CountedMethod("coalesced reduce_scatter_tensor", 1, 2, op=True),
    "reduce_scatter_single_coalesced": CountedMethod("coalesced reduce_scatter_tensor", 1, 2, op=True),
    "alltoall": CountedMethod("all_to_all"),
    "alltoall_base": CountedMethod("all_to_all_single"),
    "all_to_all_single": CountedMethod("all_to_all_single"),
    "barrier": CountedMethod("barrier"),
    "monitored_barrier": CountedMethod("monitored_barrier"),
}
BARRIERS = ("barrier", "monitored_barrier")

_EXCHANGES = frozenset({"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"})
"""Functions of torch that exchange objects, by several collectives each."""

Wrapped = Callable[..., Any]


@contextmanager
def unheard() -> Iterator[None]:
    """Collectives of ours, in this thread, are none of the training's."""
    global _our_thread
    before, _our_thread = _our_thread, get_ident()
    try:
        yield
    finally:
        _our_thread = before


_known, _distinct = LEDGER.known, LEDGER.distinct

_our_thread = 0
"""The one in which a collective of ours runs; 0: none does."""


def is_ours() -> bool:
    """Whether what the calling thread calls now is ours."""
    return _our_thread != 0 and _our_thread == get_ident()


def meet_groups() -> None:
    """What was called before in the groups that there are is unseen. They are compared only if it was as much on each member."""
    for group, before in groups_so_far():
        _meet(group, before)


def _meet(group: Any, before: int = 0) -> MetGroup:
    met = LEDGER.meet(group, group_facts(group), before)
    if met.calls is not None and hasattr(group, "register_pre_hook"):
        try:
            group.register_pre_hook(HOOK, partial(_dispatched, id(group)))
        except (TypeError, RuntimeError) as error:  # another torch than 2.14 may ask for more
            log.debug("what C++ calls is not counted: %s", error)
    return met


def count(rule: CountedMethod, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A collective begins, called by the caller of the caller: even if it never ends, it was called."""
    try:
        known = _known.get(id(group)) or _meet(group)
        if (calls := known.calls) is None or (modes_on() and not runs_in_earnest()):  # a rerun stops before it communicates
            return
        try:
            alike, on_host = rule.alike(args, kwargs)
        except (LookupError, AttributeError, TypeError):  # the process group is called in a way of its own
            alike, on_host = (NONE, None, NONE, NONE), _is_on_host(args)
        if on_host and known.on_host is not None:
            calls = known.on_host
        frame = calling(sys._getframe(2))
        code = frame.f_code
        key = rule.kind, alike, id(code), frame.f_lasti  # the call has the code, which lives as long
        call = _distinct.get(key)
        if call is None:
            call = _distinct[key] = _made(rule.kind, alike, group, frame)
        calls.new.append(call)
        if len(calls.new) >= KEPT:
            calls.count()
    except Exception:
        LEDGER.stop()
        log.exception(_FAULT)


def _safely(body: Callable[..., None], *args: Any) -> None:
    try:
        body(*args)
    except Exception:
        LEDGER.stop()
        log.exception(_FAULT)


def _is_on_host(args: Any) -> bool:
    """Whether the first tensor is. By its attribute: to ask for its class takes five times as long."""
    while type(args) in (list, tuple) and args:
        args = args[0]
    return bool(getattr(args, "is_cpu", False))


def _made(kind: str, alike: Alike, group: Any, frame: FrameType | None) -> DistinctCall:
    numel, dtype, op, root = alike
    facts = group_facts(group)
    if facts is not None and 0 <= root < len(facts.ranks):
        root = facts.ranks[root]
    signature = Signature(kind, numel, str(dtype or "").removeprefix("torch."), _OPS.get(op, ""), root)
    if frame is None:
        return DistinctCall(signature, None, 0)
    callers = [one.f_code.co_name for one in outwards(sys._getframe(3))][:8]
    return DistinctCall(signature, frame.f_code, frame.f_lineno, next((name for name in callers if name in _EXCHANGES), ""))


def _ops() -> Iterator[tuple[int, str]]:
    kinds = getattr(getattr(process_groups, "ReduceOp", None), "RedOpType", None)
    for name, kind in getattr(kinds, "__members__", {}).items():
        yield int(kind), name.lower()


_OPS = dict(_ops())


def counted(method: str, original: Wrapped) -> Wrapped:
    """A barrier, which nothing else is to know of."""
    rule = COUNTED[method]

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            count(rule, self, args, kwargs)
        return original(self, *args, **kwargs)

    WRAPPERS.add(called.__code__)
    never_compile(called)
    return called


# --- what is dispatched -----------------------------------------------------------------------------------------------

HOOK = 0x72616E6B
"""The number of our hook of a process group, which has one of each number."""

WRAPPERS: set[CodeType] = set()
"""The code of those that count what they call: what is dispatched from there is counted already."""

_DISPATCHED = {
    "BROADCAST": CountedMethod("broadcast", 0, root=True),
    "ALLREDUCE": CountedMethod("all_reduce", 0),
    "REDUCE": CountedMethod("reduce", 0, root=True),
    "ALLGATHER": CountedMethod("all_gather"),
    "REDUCE_SCATTER": CountedMethod("reduce_scatter"),
    "ALLTOALL": CountedMethod("all_to_all"),
    "GATHER": CountedMethod("gather", root=True),
    "SCATTER": CountedMethod("scatter", root=True),
    "BARRIER": CountedMethod("barrier"),
}
"""By torch's names. Which reduction it is, torch does not say here."""

_standing_in = 0
"""The thread of a rank that has joined, which calls from Python what the others call in C++."""


def _dispatched(place: int, call: Any) -> None:
    """A collective of the group that has this ``id`` begins, called from anywhere."""
    try:
        frame = _caller()
        if frame is not None and frame.f_code in WRAPPERS and _standing_in != get_ident():
            return
        rule, known = _DISPATCHED.get(call.name.name), _known.get(place)
        if rule is None or known is None or known.calls is None:
            return
        given = call.input_tensors
        numel = sum([tensor.numel() for tensor in given]) if rule.sized is not None else NONE
        alike = numel, given[0].dtype if numel >= 0 and given else None, NONE, call.root if rule.has_root else NONE
        frame = None if frame is None else calling(frame)
        key = HOOK, rule.kind, alike, None if frame is None else (id(frame.f_code), frame.f_lasti)
        if (made := _distinct.get(key)) is None:
            made = _distinct[key] = _made(rule.kind, alike, known.group(), frame)
        (known.on_host if known.on_host is not None and _is_on_host(given) else known.calls).add(made)
    except Exception:
        LEDGER.stop()
        log.exception(_FAULT)


def _stop_hearing() -> None:
    """A group may live longer than the interpreter, and would then take down a hook that is not there any more: it crashed."""
    for known in tuple(_known.values()):
        if (group := known.group()) is not None and hasattr(group, "unregister_pre_hook"):
            group.unregister_pre_hook(HOOK)


atexit.register(_stop_hearing)


def _caller() -> FrameType | None:
    """Who calls what the caller of this was called for; None: a thread of C++."""
    try:
        return sys._getframe(2)
    except ValueError:
        return None


# --- DDP --------------------------------------------------------------------------------------------------------------


def count_ddp() -> None:
    """Wraps methods of DDP, once for the process. A rank that has joined calls some of them for those that go on."""
    patch(DistributedDataParallel, "_post_forward", _reaching)
    patch(DistributedDataParallel, "_sync_module_buffers", partial(_standing_for, "DDP's buffers"))
    patch(DistributedDataParallel, "_match_all_reduce_for_bwd_pass", partial(_standing_for, "DDP's backward"))
    patch(DistributedDataParallel, "_match_unused_params_allreduce", _uncounted)


class _DdpCall:
    """What DDP calls in C++, from the user's line that led to it. Counted once."""

    def __init__(self, kind: str, ddp: Any, frame: FrameType) -> None:
        frame = calling(frame)
        key = kind, id(frame.f_code), frame.f_lasti
        self._call = LEDGER.distinct.get(key) or DistinctCall(
            Signature(kind), frame.f_code, frame.f_lineno, f"{kind}, of the forward"
        )
        LEDGER.distinct[key] = self._call
        self._ddp: weakref.ReferenceType[Any] = weakref.ref(ddp)
        self._is_counted = False

    def count(self) -> None:
        ddp = self._ddp()
        if self._is_counted or ddp is None:
            return
        self._is_counted = True
        group = ddp.process_group
        calls = (_known.get(id(group)) or _meet(group)).calls
        if calls is not None:
            calls.add(self._call)


def _standing_for(kind: str, original: Wrapped) -> Wrapped:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        _safely(lambda frame: _DdpCall(kind, self, frame).count(), sys._getframe(1))
        return original(self, *args, **kwargs)

    never_compile(called)
    return called


def _reaching(original: Wrapped) -> Wrapped:
    """A forward of DDP: once a backward reaches its outputs, DDP reduces gradients. A device's thread has no line of the user."""

    def called(self: Any, output: Any) -> Any:
        output = original(self, output)
        if torch.is_grad_enabled() and self.require_backward_grad_sync and not torch.compiler.is_compiling():
            _safely(_await_backward, self, output, sys._getframe(1))
        return output

    never_compile(called)
    return called


def _await_backward(ddp: Any, output: Any, frame: FrameType) -> None:
    call = _DdpCall("DDP's backward", ddp, frame)
    for value in outputs_of(output):
        value.register_hook(partial(_reached, call))


def _reached(call: _DdpCall, _: Tensor | None) -> None:
    if not torch.compiler.is_dynamo_compiling():
        _safely(call.count)


def _uncounted(original: Wrapped) -> Wrapped:
    """A rank that has joined calls here from Python what the others call in C++: it is counted where that is."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _standing_in
        before, _standing_in = _standing_in, get_ident()
        try:
            with unheard():
                return original(self, *args, **kwargs)
        finally:
            _standing_in = before

    never_compile(called)
    return called


never_compile(_reached)
