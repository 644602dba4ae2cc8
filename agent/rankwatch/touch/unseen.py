"""Calls our functions so that neither the compiler nor a mode of torch sees them, and none of them ends up in a user's pickle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

# Private, so they may be missing: then a compiled model's hooks break its graph, and nothing else changes.
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
set_eval_frame: Callable[[Any], Any] = getattr(_eval_frame, "set_eval_frame", lambda callback: None)

# Private, too: if it is missing, the modes see our operations.
modes_on: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)

DOES_NOTHING = getattr, (nullcontext(), "__exit__")
"""What a hook of ours is in a pickle: it does nothing, and loads without rankwatch."""


def inert(*args: Any) -> None:
    """The hook in a copied model."""


class OutsideOfGraph:
    """A hook of a wrapper. In a copy or pickle of the model it does nothing."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return DOES_NOTHING


def unseen(body: Callable[..., None], *args: Any) -> None:
    """Calls ``body`` while modes are on that see every operation: profilers, memory estimators, selective checkpointing.

    They must see only the model's operations. If its tensors are fake, there is nothing to measure, and nothing is called.
    Nor is anything called under a mode that has ``runs_again``: a forward is run again after a trip.
    """
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, FakeTensorMode) or getattr(mode, "runs_again", False) for mode in modes):
        return
    with _disable_current_modes():
        body(*args)


def never_compile(function: Callable[..., Any]) -> None:
    """Prevents that ``function`` becomes a graph of its own. When called inside of a graph, it is still traced."""
    code = function.__code__
    skip_code = getattr(_eval_frame, "skip_code", None)
    if skip_code is not None:  # torch 2.4
        skip_code(code)
    elif hasattr(_eval_frame, "set_code_exec_strategy"):
        action = getattr(_eval_frame, "_FrameAction", None) or _eval_frame.FrameAction
        strategy = getattr(_eval_frame, "_FrameExecStrategy", None) or _eval_frame.FrameExecStrategy
        _eval_frame.set_code_exec_strategy(code, strategy(action.SKIP, action.DEFAULT))


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
