"""Calls our functions so that neither the compiler nor a mode of torch sees them, and none of them ends up in a user's pickle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .torch_private import is_fake, modes, modes_on, never_compile, set_eval_frame, without_modes

DOES_NOTHING = getattr, (nullcontext(), "__exit__")
"""What a hook of ours is in a pickle: it does nothing, and loads without rankwatch."""


def inert(*args: Any) -> None:
    """The hook in a copied model."""


class OutsideOfGraph:
    """A hook of a wrapper: ``body`` is given what the hook is given beside the module. In a copy or pickle it does nothing."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __call__(self, module: Any, *given: Any) -> None:
        quietly(self._body, *given)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return DOES_NOTHING


def unseen(body: Callable[..., None], *args: Any) -> None:
    """Calls ``body`` while modes are on that see every operation: profilers, memory estimators, selective checkpointing.

    They must see only the model's operations. If its tensors are fake, there is nothing to measure, and nothing is called.
    Nor is anything called under a mode that has ``runs_again``: a forward is run again after a trip.
    """
    if any(is_fake(mode) or getattr(mode, "runs_again", False) for mode in modes()):
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
