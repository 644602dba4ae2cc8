"""Sees what a compiled model is given, before its graph runs: no hook of ours is called in a graph with its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..measure.modules import wrapped_in
from .hooks import DOES_NOTHING, inert, never_compile, quietly


class CompiledEntry:
    """Calls ``given(args, kwargs)`` before each forward of a model that was compiled before it was watched.

    ``torch.compile(model)`` makes a wrapper, which takes a hook. ``model.compile()`` puts a function in place of the call.
    """

    def __init__(self, model: nn.Module, given: Callable[[Any, Any], None]) -> None:
        self._undo: list[Callable[[], None]] = []
        for module in wrapped_in(model):
            if "_orig_mod" in module._modules:
                handle = module.register_forward_pre_hook(_BeforeGraph(given), with_kwargs=True)
                self._undo.append(handle.remove)
                return
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._replace_call(module, given)
                return

    def _replace_call(self, module: Any, given: Callable[[Any, Any], None]) -> None:
        original = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            quietly(given, args, kwargs)
            return original(*args, **kwargs)

        never_compile(call)
        module._compiled_call_impl = call

        def undo() -> None:
            if module._compiled_call_impl is call:
                module._compiled_call_impl = original

        self._undo.append(undo)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


class _BeforeGraph:
    """In a copy or pickle of the model it does nothing."""

    def __init__(self, given: Callable[[Any, Any], None]) -> None:
        self._given = given

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        quietly(self._given, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return DOES_NOTHING
