"""``torch.jit.script`` compiles a module with its hooks: it must not see ours, which are no TorchScript."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...touch.patched import patch
from ...touch.unseen import is_ours

# Private, so they may be missing: then a watched model cannot be scripted, and nothing else changes.
_READERS = ("get_hook_stubs", "infer_concrete_type_builder")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def hide_hooks() -> None:
    """Hides hooks from ``torch.jit.script``, once for the process."""
    for name in _READERS:
        patch(getattr(torch.jit, "_recursive", None), name, _without)


def _without(original: Callable[..., Any]) -> Callable[..., Any]:
    def reader(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _hidden(module):
            return original(module, *args, **kwargs)

    return reader


@contextmanager
def _hidden(module: nn.Module) -> Iterator[None]:
    before = {name: getattr(module, name) for name in _HOOKS}
    try:
        for name, hooks in before.items():
            setattr(module, name, OrderedDict((key, hook) for key, hook in hooks.items() if not is_ours(hook)))
        yield
    finally:
        for name, hooks in before.items():
            setattr(module, name, hooks)
