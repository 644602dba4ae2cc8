"""Hooks on every module of a model, also on those added later, and the way off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .modules import NamedModule, named_modules, unwrap

# Private, so looked up with care: without it hooks in compiled models are traced, and nothing else changes.
_eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
set_eval_frame: Callable[[Any], Any] = getattr(_eval_frame, "set_eval_frame", lambda callback: None)

Guard = Callable[[Callable[..., None]], Callable[..., None]]
"""Makes a hook's body safe to run in somebody else's training."""


class Hooks:
    """Calls ``enter`` and ``leave`` round each forward under ``model``, ``before_step`` and ``after_step`` round optimizer steps.

    ``enter(named, args, kwargs)``, ``leave(named, args, kwargs, output)``; the root's ``leave`` is also called, with output
    None, when its forward raised. A deep copy or a pickle of the model carries no hooks that do anything.
    """

    def __init__(
        self,
        model: nn.Module,
        guard: Guard,
        *,
        enter: Callable[..., None],
        leave: Callable[..., None],
        before_step: Callable[..., None],
        after_step: Callable[..., None],
    ) -> None:
        self.root = unwrap(model)
        self._enter = enter
        self._leave = leave
        self._guard = guard
        self._hooked: dict[int, NamedModule] = {}
        # torch holds these three for the whole process: through them a model that nobody else holds would never be freed.
        self._global = [guard(self._on_module_added), guard(before_step), guard(after_step)]
        added, before, after = map(_weakly, self._global)
        handles = [
            register_module_module_registration_hook(added),
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]
        self._release = weakref.finalize(self, _remove, handles)
        self._release.atexit = False
        self._handles: list[RemovableHandle] = []
        self._attach(named_modules(self.root))

    def remove(self) -> None:
        self._release()
        _remove(self._handles)
        self._hooked.clear()

    def _attach(self, modules: dict[int, NamedModule]) -> None:
        for key, named in modules.items():
            known = self._hooked.get(key)
            if known is not None:
                known.names += [name for name in named.names if name not in known.names]
                continue
            self._hooked[key] = named
            enter, leave = _Hook(self._guard(self._enter), named), _Hook(self._guard(self._leave), named)
            self._handles.append(named.module.register_forward_pre_hook(enter, with_kwargs=True))
            # Only the root must hear of a forward that raised: it closes the batch.
            is_root = named.module is self.root
            self._handles.append(named.module.register_forward_hook(leave, with_kwargs=True, always_call=is_root))

    def _on_module_added(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        named = self._hooked.get(id(parent))
        if named is None or child is None:
            return
        for prefix in list(named.names):
            self._attach(named_modules(child, f"{prefix}.{name}" if prefix else name))


class _Hook:
    """A hook that knows its module's names and stays behind when the module is copied or pickled."""

    __slots__ = ("_call", "_named")

    def __init__(self, call: Callable[..., None], named: NamedModule) -> None:
        self._call = call
        self._named = named

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        # In a compiled model the hook runs between the graphs: neither it nor what it calls is to be traced. This is what
        # torch.compiler.disable comes down to, without its import of the whole compiler.
        before = set_eval_frame(None)
        try:
            self._call(self._named, *rest)
        finally:
            set_eval_frame(before)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert_hook, ()  # copy.deepcopy asks here too


def _weakly(function: Callable[..., None]) -> Callable[..., None]:
    reference = weakref.ref(function)

    def call(*args: Any) -> None:
        held = reference()
        if held is not None:
            held(*args)

    return call


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _inert(*args: Any) -> None:
    """What a copied model has in place of our hooks."""


def _inert_hook() -> Callable[..., None]:
    return _inert
