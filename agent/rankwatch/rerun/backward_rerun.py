"""Runs a rank's own batch again, forward and backward, without any collective: what this rank's part of a gradient was.

The loss is the user's code, and is not run again: the gradients that it handed to the root's outputs were kept, by
reference. The gradients of this backward go nowhere: no ``.grad`` changes, and no hook that waits for one is called.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from ..measure.walk import leaves
from ..shared.types.frame import State
from ..shared.types.trip import Operator, Source
from ..touch.torch_private import graph_node, graph_task
from ..touch.whose_code import owner_of, text_of
from .arguments import Input, state_of_tensor
from .careful import Altered, Careful, Stopped, same_surroundings, uncollected, untouched
from .forward import Forward, RootEntry, hooked
from .limit import Limit
from .repetition import Repeated, Repetition, describe_error, why_it_differs
from .user_line import Caller, caller_of

log = logging.getLogger(__name__)

MAX_NODES = 5_000
"""Of a graph, that are looked at for an output that another output was made from."""

_OTHER_WAYS = (
    "it came by a way that does not lead through the model's outputs, the training changed it after the backward, or it did not "
    "recur"
)
OTHERWISE = f"run again, it was finite: {_OTHER_WAYS}"
OTHERWISE_COMPILED = f"run again eagerly, it was finite: the compiled code made it, {_OTHER_WAYS}"

FROM_THE_LOSS = "not run again: the gradient that came from the loss was bad, and the loss is the user's code"

Watch = Callable[[Any, Any, Any, Any], None]
"""Called with a module, and the args, kwargs and output of its call, as it leaves."""


class RootRun:
    """A forward of the root, and the gradients that the loss handed to its outputs.

    ``gradients`` has one entry for each backward that came: the gradients by the number of the output (see ``outputs_of``).
    An output that another one was made from, as a loss is made from logits, needs none: its gradient follows.
    """

    def __init__(
        self,
        entry: RootEntry,
        output: Any,
        *,
        gradients: Sequence[dict[int, Tensor]] = (),
        is_compiled: bool = False,
    ) -> None:
        entry.leave()
        self.entry = entry
        self.is_compiled = is_compiled
        self.gradients = list(gradients)
        self._task = -1
        self._made = _made_from(outputs_of(output))

    def keep(self, number: int, gradient: Tensor | None) -> None:
        """A backward hands a gradient to an output. None is a gradient of 0."""
        task = graph_task()
        if task != self._task or not self.gradients:
            self._task = task
            self.gradients.append({})
        handed = self.gradients[-1]
        if gradient is not None and not any(later in handed for later in self._made.get(number, ())):
            handed[number] = gradient.detach()

    @property
    def kept(self) -> Iterator[Tensor]:
        """What it keeps alive."""
        yield from (gradient for handed in self.gradients for gradient in handed.values())
        yield from self.entry.given


def outputs_of(output: Any) -> list[Tensor]:
    """The outputs of a root to which a backward hands a gradient, each once."""
    given = [output] if type(output) is Tensor else [value for _, value in leaves(output, "output")]
    found = {id(value): value for value in given if isinstance(value, Tensor) and value.grad_fn is not None}
    return list(found.values())


def _made_from(outputs: list[Tensor]) -> dict[int, frozenset[int]]:
    """For each output the later ones that were made from it."""
    if len(outputs) < 2:
        return {}
    numbers: dict[Any, int] = {}
    for number, output in enumerate(outputs):
        numbers.setdefault(output.grad_fn, number)
    lowest = min(_sequence(node) for node in numbers)
    found: dict[int, set[int]] = {}
    for start, number in numbers.items():
        seen, rest = {start}, [start]
        while rest and len(seen) < MAX_NODES:
            for node, _ in rest.pop().next_functions:
                if node is None or node in seen or not lowest <= _sequence(node) < _LEAF:
                    continue
                seen.add(node)
                rest.append(node)
                if node in numbers:
                    found.setdefault(numbers[node], set()).add(number)
    return {number: frozenset(later) for number, later in found.items()}


_LEAF = 2**63
"""The sequence number of a node that accumulates a gradient is above it."""


def _sequence(node: Any) -> int:
    return int(node._sequence_nr())


class Ran(NamedTuple):
    """The gradients of the parameters, in their order, or why there are none.

    ``made``: the bytes that operators made. ``drew``: the forward drew random numbers.
    """

    gradients: list[Tensor | None]
    note: str = ""
    made: int = 0
    drew: bool = False

    @property
    def is_bad(self) -> bool:
        return any(value is not None and state_of_tensor(value) is not State.FINITE for value in self.gradients)


@uncollected()
def run_batch_again(run: RootRun, parameters: Sequence[Tensor], watch: Watch, limit: Limit | None = None) -> Ran:
    """Runs a forward of the root and its backward again. ``watch`` is called for each module that runs."""
    module = run.entry.module
    if why := forward_of(run).refusal:
        return Ran([], why)
    mode = Careful([*module.buffers()], limit)
    try:
        with _hooks_on(module, watch), torch.autograd.set_detect_anomaly(False):  # the user's would raise
            gradients, changes = run_again(run, parameters, mode, watch)
    except Stopped as stop:
        return Ran([], str(stop))
    except Exception as error:  # noqa: BLE001  the trip matters more than where it came from
        log.debug("the batch cannot be run again: %r", error)
        return Ran([], describe_error(error))
    return Ran(gradients, _why_it_differs(run, changes), mode.made, changes.drew)


@uncollected()
def origin_of_gradient(run: RootRun, parameters: Sequence[Tensor], limit: Limit) -> Repeated:
    """The operator that made a gradient bad, with the line of the forward whose backward ran it."""
    module = run.entry.module
    forward = forward_of(run)
    if why := forward.refusal:
        return Repeated(note=f"not run again: {why}")
    if any(state_of_tensor(gradient) is not State.FINITE for handed in run.gradients for gradient in handed.values()):
        return Repeated(note=FROM_THE_LOSS)
    mode = _Backward(forward, limit)
    try:
        # With the mode for anomalies, each node remembers the line that made it. It warns where a backward raises.
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True, check_nan=False):
            warnings.simplefilter("ignore")
            gradients, changes = run_again(run, parameters, mode, lambda *call: None, mode.turn)
    except Stopped as stop:
        return Repeated(note=f"not run again: {stop}", is_late=mode.is_late)
    except Exception as error:  # noqa: BLE001
        log.debug("the backward of %s cannot be run again: %r", type(module).__name__, error)
        return Repeated(note=f"not run again: {describe_error(error)}")
    found = mode.origin_of([gradient for gradient in gradients if gradient is not None])
    if found is None:
        return Repeated(note=_why_it_differs(run, changes) or (OTHERWISE_COMPILED if run.is_compiled else OTHERWISE))
    return found if found.given is None else found._replace(operator=None)


def _why_it_differs(run: RootRun, changes: Altered) -> str:
    if run.is_compiled and changes.drew:
        return "it draws random numbers, and compiled code may draw others"
    return why_it_differs(forward_of(run), changes)


def run_wide(
    run: RootRun, parameters: Sequence[Tensor], dtype: torch.dtype, limit: Limit, wanted: Callable[[], bool]
) -> Ran:
    """Runs forward and backward again in a wider precision."""
    from .wider import Wider, plain_kernels

    mode = Wider(dtype, [*run.entry.module.buffers()], limit, wanted, with_weights=True, with_gradients=True)
    args, kwargs = mode.widened((run.entry.args, run.entry.kwargs))
    try:
        with plain_kernels(), torch.autograd.set_detect_anomaly(False):
            return Ran(run_again(run, parameters, mode, lambda *call: None, given=(args, kwargs))[0])
    except Stopped as stop:
        return Ran([], f"stopped: {stop}")
    except Exception as error:  # noqa: BLE001  a line in the report
        return Ran([], describe_error(error))


def run_again(
    run: RootRun,
    parameters: Sequence[Tensor],
    mode: Careful,
    watch: Watch,
    turn: Callable[[], None] = lambda: None,
    given: tuple[Any, Any] | None = None,
) -> tuple[list[Tensor | None], Altered]:
    """Forward and backward under a mode; returns the gradients of the parameters, and what the forward had changed.

    ``turn`` is called between the two. ``given``: the args and kwargs, if not those of the training.
    """
    entry, changes = run.entry, Altered()
    module, wanted = entry.module, [value for value in parameters if value.requires_grad]
    sums: dict[int, Tensor] = {}
    args, kwargs = _cut(given or (entry.args, entry.kwargs))
    mode.module = module
    with (
        _silent(module),
        _no_reentrant_checkpoints(),
        untouched(module, changes),
        same_surroundings(module, args, kwargs, changes, entry.again()),
        torch.enable_grad(),
        prepared(mode, module),
    ):
        output = hooked(module, args, kwargs, entry.forward(*args, **kwargs))
        watch(module, args, kwargs, output)
        outputs = outputs_of(output)
        turn()
        for nth, handed in enumerate(run.gradients, 1):
            if not handed:
                continue
            made = [outputs[number] for number in handed]
            more = nth < len(run.gradients)
            gradients = [value.to(outputs[number].dtype) for number, value in handed.items()]
            leaves_of = list(map(mode.in_place_of, wanted))
            found = torch.autograd.grad(made, leaves_of, gradients, retain_graph=more, allow_unused=True)
            for parameter, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    known = sums.get(id(parameter))
                    sums[id(parameter)] = gradient if known is None else known + gradient
    mode.check()  # the forward may have caught what stopped it
    return [sums.get(id(parameter)) for parameter in parameters], changes


@contextmanager
def prepared(mode: Careful, module: nn.Module) -> Iterator[None]:
    mode.prepare(module)
    with mode:
        yield


def forward_of(run: RootRun) -> Forward:
    """The forward alone."""
    return Forward(run.entry.module, run.entry.args, run.entry.kwargs, "output", entry=run.entry)


def _cut(given: Any) -> Any:
    """What a forward was given, without the graph that made it: another model's, or an earlier part of this batch."""
    if not any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(given)):
        return given
    return pytree.tree_map(
        lambda leaf: (
            leaf.detach().requires_grad_().clone() if isinstance(leaf, Tensor) and leaf.grad_fn is not None else leaf
        ),
        given,
    )


@contextmanager
def _hooks_on(root: nn.Module, watch: Watch) -> Iterator[None]:
    """Calls ``watch`` for each module below the root."""

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch(module, args, kwargs, output)

    handles = [module.register_forward_hook(leave, with_kwargs=True) for module in root.modules() if module is not root]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _silent(module: nn.Module) -> Iterator[None]:
    """A LightningModule's step logs, which it did before."""
    names = ("log", "log_dict") if any(_is_lightning(cls) for cls in type(module).__mro__) else ()
    had = {name: module.__dict__[name] for name in names if name in module.__dict__}
    module.__dict__.update(dict.fromkeys(names, lambda *args, **kwargs: None))
    try:
        yield
    finally:
        for name in names:
            module.__dict__.pop(name, None)
        module.__dict__.update(had)


@contextmanager
def _no_reentrant_checkpoints() -> Iterator[None]:
    """A reentrant checkpoint refuses a backward whose gradients go nowhere: what is in it runs without a checkpoint."""
    checkpointed: Any = checkpoint.CheckpointFunction
    had = checkpointed.__dict__.get("apply")
    checkpointed.apply = staticmethod(lambda function, keeps_random_state, *args: function(*args))
    try:
        yield
    finally:
        if had is None:
            del checkpointed.apply
        else:
            checkpointed.apply = had


def _is_lightning(cls: type) -> bool:
    return cls.__name__ == "LightningModule" and cls.__module__.startswith(("lightning", "pytorch_lightning"))


# --- the line of the forward ------------------------------------------------------------------------------------------


class _Backward(Repetition):
    """Follows bad numbers through a forward and its backward."""

    _is_backward = False

    def turn(self) -> None:
        self._is_backward = True

    def _operator(self, func: Any, inputs: list[Input], output: Tensor) -> Operator:
        operator = super()._operator(func, inputs, output)
        if not self._is_backward:
            return operator
        node = graph_node()
        here = caller_of(within_run=True)
        if here is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
            return replace(operator, source=here.source)  # a tensor's hook, or a checkpoint's forward
        if node is None:  # the sum of what came from several uses of a tensor
            return replace(operator, source=None)
        return replace(operator, source=_line_of(node, self._forward.entry), node=node.name())


_LINE = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


def _line_of(node: Any, entry: RootEntry | None) -> Source | None:
    """The user's line whose forward made this node of the graph: the innermost one within the forward."""
    for text in reversed(node.metadata.get("traceback_") or []):
        found = _LINE.match(text)
        if found is None:
            continue
        owner = owner_of(found["file"])
        if owner == "user":
            line = int(found["line"])
            return Source(found["file"], line, found["function"].strip(), text_of(found["file"], line))
        if owner == "ours":
            break
    caller: Caller | None = entry.caller if entry is not None else None
    return caller.source if caller is not None else None
