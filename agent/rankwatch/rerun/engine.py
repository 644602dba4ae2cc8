"""The one engine that runs a forward again, or a forward and its backward, under a mode.

``careful`` sees to it that a rerun harms nothing. Whatever ends a rerun before its end is caught here, and becomes a note.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from ..measure.recorder import Call
from ..measure.walk import leaves, outputs_of
from ..touch.parts import modules_in, parameters_in
from .careful import Altered, Careful, Stopped, same_surroundings, tensors, uncollected, untouched
from .forward import Forward
from .user_line import boundary

log = logging.getLogger(__name__)

T = TypeVar("T")

Watch = Callable[[nn.Module | str, Call], None]
"""Called with each watched module that returns, the forward's own last, and its call. Also with each label of a marked tensor,
which is passed as the output."""


def describe_error(error: BaseException) -> str:
    """What ended a forward that is run again, in a few words: an error of its own, or what stopped it."""
    text = str(error)
    if isinstance(error, Stopped):
        return text
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "out of memory" in text or "can't allocate" in text:
        return "out of memory as it was run again"
    text = " ".join(text.split())[:160]
    return f"run again, it raised {type(error).__name__}" + (f": {text}" if text else "")


@dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """What came of a rerun.

    ``values`` is None if the rerun did not come to its end. Then ``note`` says why, and ``was_stopped`` whether something else
    than an error has ended it. ``changes`` is what the forward had changed, and was restored.
    """

    values: list[T] | None
    changes: Altered
    note: str = ""
    was_stopped: bool = False


class Rerun:
    """A rerun of a forward under a mode, of which ``forward`` or ``backward`` is called, once.

    Args:
        describe: what the note says of an error.
    """

    def __init__(
        self,
        forward: Forward,
        mode: Careful,
        watch: Watch | None = None,
        describe: Callable[[Exception], str] = describe_error,
    ) -> None:
        self._forward = forward
        self._mode = mode
        self._watch = watch
        self._describe = describe
        self._calls = 0
        self._reached: list[Any] = []
        """The output in which the forward was bad before, once it is there."""

    def forward(self, *, grad: bool) -> Ran[Tensor]:
        """Runs the forward until it has come to where it was bad. The values are the tensors in which it was bad."""
        self._mode.left = self._leave
        return self._run(self._run_forward, grad=grad)

    def backward(self, gradients: Sequence[dict[int, Tensor]], *, keeps_lines: bool = False) -> Ran[Tensor | None]:
        """Runs all of the forward, then its backwards. The values are the gradients of the module's parameters, in their order.

        Args:
            gradients: what each backward hands to the outputs, by the number of the output (see ``outputs_of``).
            keeps_lines: whether each node of the graph remembers the line that made it.
        """
        parameters = list(parameters_in(self._forward.module))  # the mode may put others in their place
        body = partial(self._run_backward, parameters, gradients)
        with torch.autograd.set_detect_anomaly(keeps_lines, check_nan=False):  # the user's would raise
            return self._run(body, grad=True, prepared=_cut)

    @boundary
    def _run(
        self,
        body: Callable[[Any, Any], list[T]],
        *,
        grad: bool,
        prepared: Callable[[Any], Any] = lambda given: given,
    ) -> Ran[T]:
        forward, module, mode, changes = self._forward, self._forward.module, self._mode, Altered()
        mode.module = module
        try:
            args, kwargs = prepared(mode.given((forward.args, forward.kwargs)))
            with (
                uncollected(),
                mode.kernels(),
                untouched(module, changes),
                same_surroundings(
                    module, args, kwargs, changes, forward.entry.again() if forward.entry is not None else None
                ),
                torch.set_grad_enabled(grad),
            ):
                mode.prepare(module)
                mode.keep(module)
                try:
                    with mode:
                        return Ran(body(args, kwargs), changes)
                finally:
                    mode.put_back(changes)
        except (Exception, Stopped) as error:  # noqa: BLE001  the trip matters more than what a rerun shows
            log.debug("%s was not run again to its end: %r", type(module).__name__, error)
            if mode.stopped or isinstance(error, Stopped):  # the forward may have raised an error as it was stopped
                return Ran(None, changes, mode.stopped or str(error), was_stopped=True)
            return Ran(None, changes, self._describe(error))

    def _call(self, args: Any, kwargs: Any) -> Any:
        forward = self._forward
        call = forward.entry.forward if forward.entry is not None else forward.module.forward
        output = _hooked(forward.module, args, kwargs, call(*args, **kwargs))
        if self._watch is not None:
            self._watch(forward.module, (args, kwargs, output))
        return output

    # --- a forward ----------------------------------------------------------------------------------------------------

    def _leave(self, key: nn.Module | str, call: Call) -> None:
        if self._watch is not None:
            self._watch(key, call)
        inner = self._forward.inner
        if key is inner or (isinstance(key, str) and key == inner):
            self._calls += 1
            if self._calls == self._forward.nth and not self._reached:
                self._reached.append(call[-1])
                self._mode.stop("it has come to where it was bad")

    def _run_forward(self, args: Any, kwargs: Any) -> list[Tensor]:
        forward, reached = self._forward, self._reached
        try:
            output = self._call(args, kwargs)
        except (Exception, Stopped):
            if not reached:
                raise
        if not reached:
            self._mode.check()  # the forward may have caught what stopped it
            if forward.inner is not None:
                raise Stopped("run again, it did not come to where it was bad")
            reached.append(output)
        named = leaves(reached[0], "output")
        bad = [leaf for label, leaf in named if label == forward.label and isinstance(leaf, Tensor)]
        return bad or tensors(reached[0])

    # --- a backward ---------------------------------------------------------------------------------------------------

    def _run_backward(
        self, parameters: list[nn.Parameter], gradients: Sequence[dict[int, Tensor]], args: Any, kwargs: Any
    ) -> list[Tensor | None]:
        """The gradients go nowhere: no ``.grad`` changes, and no hook that waits for one is called."""
        wanted = [value for value in parameters if value.requires_grad]
        sums: dict[int, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(_silent(self._forward.module))
            stack.enter_context(_no_reentrant_checkpoints())
            if self._watch is not None:
                stack.enter_context(_hooks_on(self._forward.module, self._watch))
            outputs = outputs_of(self._call(args, kwargs))
            self._mode.turn()
            for nth, handed in enumerate(gradients, 1):
                if not handed:
                    continue
                made = [outputs[number] for number in handed]
                found = torch.autograd.grad(
                    made,
                    list(map(self._mode.in_place_of, wanted)),
                    [value.to(output.dtype) for output, value in zip(made, handed.values(), strict=True)],
                    retain_graph=nth < len(gradients),
                    allow_unused=True,
                )
                for parameter, gradient in zip(wanted, found, strict=True):
                    if gradient is not None:
                        known = sums.get(id(parameter))
                        sums[id(parameter)] = gradient if known is None else known + gradient
        self._mode.check()  # the forward may have caught what stopped it
        return [sums.get(id(parameter)) for parameter in parameters]


def _hooked(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """What the user's forward hooks make of an output, up to the hook of the watch, which saw the bad one."""
    hooks = {**torch_module._global_forward_hooks, **module._forward_hooks}
    with_kwargs = {**torch_module._global_forward_hooks_with_kwargs, **module._forward_hooks_with_kwargs}
    for key, hook in hooks.items():
        if type(hook).__module__.startswith("rankwatch."):
            break
        given = (args, kwargs, output) if key in with_kwargs else (args, output)
        changed: Any = hook(module, *given)
        output = output if changed is None else changed
    return output


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
        watch(module, (args, kwargs, output))

    handles = [module.register_forward_hook(leave, with_kwargs=True) for module in modules_in(root) if module is not root]
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


def _is_lightning(cls: type) -> bool:
    return cls.__name__ == "LightningModule" and cls.__module__.startswith(("lightning", "pytorch_lightning"))


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
