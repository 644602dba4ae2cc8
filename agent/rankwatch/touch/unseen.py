"""Calls our functions so that neither the compiler nor a mode of torch sees them, and none of them ends up in a user's pickle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from .patched import OURS, patch
from .torch_private import is_fake, modes, modes_on, never_compile, set_eval_frame, without_modes

DOES_NOTHING = getattr, (nullcontext(), "__exit__")
"""What a hook of ours is in a pickle: it does nothing, and loads without rankwatch."""


def inert(*args: Any) -> None:
    """The hook in a copied model."""


class Hidden:
    """A hook of ours on a module. No copy or pickle of a module has it (``hide``); a copy of a table has one that is inert."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return DOES_NOTHING


class OutsideOfGraph(Hidden):
    """A hook of a wrapper: ``body`` is given what the hook is given beside the module."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __call__(self, module: Any, *given: Any) -> None:
        quietly(self._body, *given)


def is_ours(hook: Any) -> bool:
    """Whether it is a hook of ours, or what is in its place in a copy or pickle."""
    return isinstance(hook, Hidden) or hook is inert or isinstance(getattr(hook, "__self__", None), nullcontext)


def hide() -> None:
    """Keeps our hooks out of copies and pickles of modules, once for the process: ``torch.load`` refuses even what is inert."""
    patch(nn.Module, "__reduce_ex__", _without_ours)


def _without_ours(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def __reduce_ex__(module: nn.Module, protocol: Any) -> Any:
        reduced = reduce(module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 2:
            return reduced
        made_by, given, *rest = reduced  # a graph of torch.fx has its state in what it is made of
        return made_by, tuple(map(_cleaned, given)), *map(_cleaned, rest)

    return __reduce_ex__


def _cleaned(state: Any) -> Any:
    """The state of a module without what is ours: its hooks, and methods that are marked as ours."""
    if type(state) is not dict or "_forward_hooks" not in state:
        return state
    clean = {name: value for name, value in state.items() if not hasattr(getattr(value, "__func__", None), OURS)}
    for name, hooks in state.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            ours = [key for key, hook in hooks.items() if is_ours(hook)]
            for table in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                if ours and table in clean:
                    clean[table] = type(clean[table])(item for item in clean[table].items() if item[0] not in ours)
    return clean


def runs_in_earnest() -> bool:
    """Whether no mode is on under which tensors are fake, or a forward is run again."""
    return not modes_on() or not any(is_fake(mode) or getattr(mode, "runs_again", False) for mode in modes())


def unseen(body: Callable[..., None], *args: Any) -> None:
    """Calls ``body`` while modes are on that see every operation: profilers, memory estimators, selective checkpointing.

    They must see only the model's operations. If its tensors are fake, there is nothing to measure, and nothing is called.
    Nor is anything called under a mode that has ``runs_again``: a forward is run again after a trip.
    """
    if not runs_in_earnest():
        return
    with without_modes():
        body(*args)


def quietly(body: Callable[..., None], *args: Any) -> None:
    """Calls ``body`` outside of hooks, unseen by the compiler and by modes, as hooks do."""
    before = set_eval_frame(None)
    try:
        if modes_on():
            unseen(body, *args)
        else:
            body(*args)
    finally:
        set_eval_frame(before)


for _function in (unseen, quietly):
    never_compile(_function)
