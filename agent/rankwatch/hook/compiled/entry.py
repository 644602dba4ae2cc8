"""Sees what a compiled model is given, and what it returns, outside of its graph: no hook of ours in a graph sees these."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from torch import nn

from ...judge.events import GraphBegan, Wrapped
from ...measure.modules import unwrap, wrapped_in
from ...touch.stack import outwards
from ...touch.torch_private import never_compile
from ...touch.unseen import OutsideOfGraph, quietly

MAX_LOOKS = 4
"""Times that a compiled root's callers are looked at, before it is taken to be called in a compiled function."""

Given = Callable[[Any, Any], None]
Returned = Callable[[Any], None]


class CompiledListener(Protocol):
    """See ``CompiledEntry``."""

    @property
    def compiled_given(self) -> Given: ...
    @property
    def compiled_returned(self) -> Returned: ...


class CompiledEntry:
    """Calls ``compiled_given(args, kwargs)`` of a listener before each forward of a compiled model, and
    ``compiled_returned(output)`` after it: with output None, too, if it has raised.

    ``torch.compile(model)`` makes a wrapper, which takes hooks. ``model.compile()`` puts a function in place of the call.
    """

    events = (Wrapped, GraphBegan)

    def __init__(self, model: nn.Module, listener: CompiledListener) -> None:
        self._given = listener.compiled_given
        self._returned = listener.compiled_returned
        self._root = unwrap(model)
        self._undo: list[Callable[[], None]] = []
        self._entered: Callable[[], Any] = lambda: None
        """The module whose calls are seen. It may be a wrapper that the training replaces, so that it must not be kept alive."""
        self._looks = 0
        for module in wrapped_in(model):
            if "_orig_mod" in module._modules:
                self._wrapped(module, model)
            else:
                self._look_at(module)

    def on(self, event: Wrapped | GraphBegan) -> None:
        if isinstance(event, Wrapped):
            self._wrapped(*event)
        elif not event.is_given:
            self._look_again()

    def _wrapped(self, wrapper: nn.Module, module: nn.Module) -> None:
        if self._entered() is None and unwrap(module) is self._root:
            self._entered = ref(wrapper)
            before = wrapper.register_forward_pre_hook(OutsideOfGraph(self._given), with_kwargs=True)
            after = wrapper.register_forward_hook(OutsideOfGraph(self._forward_ends), always_call=True)
            self._undo[:] = [before.remove, after.remove]

    def _forward_ends(self, args: Any, output: Any) -> None:
        self._returned(output)

    def _look_again(self) -> None:
        """The root's graph runs, and nothing was seen before: looks at the root, and at what has called the graph.

        ``model.compile()`` may be called after ``watch``, and ``watch`` may be given what an earlier ``torch.compile`` wraps.
        """
        if self._looks == MAX_LOOKS:
            return
        self._looks += 1
        self._look_at(self._root)
        for caller in (frame.f_locals.get("self") for frame in outwards(sys._getframe(1))):
            if isinstance(caller, nn.Module) and "_orig_mod" in caller._modules:
                self._wrapped(caller, caller)

    def _look_at(self, module: nn.Module) -> None:
        if self._entered() is None and getattr(module, "_compiled_call_impl", None) is not None:
            self._replace_call(module)

    def _replace_call(self, module: Any) -> None:
        original, entered = module._compiled_call_impl, ref(module)
        given, returned = self._given, self._returned

        def call(*args: Any, **kwargs: Any) -> Any:
            quietly(given, args, kwargs)
            try:
                output = original(*args, **kwargs)
            except BaseException:
                quietly(returned, None)
                raise
            quietly(returned, output)
            return output

        never_compile(call)
        call.original = original  # type: ignore[attr-defined]  # it refers to the module
        module._compiled_call_impl = call
        ours = ref(call)

        def undo() -> None:
            module, call = entered(), ours()
            if call is not None and module is not None and module._compiled_call_impl is call:
                module._compiled_call_impl = call.original  # type: ignore[attr-defined]

        self._entered, self._undo[:] = entered, [undo]

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
