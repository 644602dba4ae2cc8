"""``torch.jit.script`` compiles a module with its hooks: it must not see ours, which are no TorchScript."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...touch.patched import patch

# Private, so they may be missing: then a watched model cannot be scripted, and nothing else changes.
_READERS = ("get_hook_stubs", "infer_concrete_type_builder")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def hide_hooks(is_ours: Callable[[Any], bool]) -> None:
    """Hides hooks from ``torch.jit.script``, once for the process."""
    for name in _READERS:
        patch(getattr(torch.jit, "_recursive", None), name, partial(_without, is_ours))


def _without(is_ours: Callable[[Any], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    def reader(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _hidden(module, is_ours):
            return original(module, *args, **kwargs)

    return reader


@contextmanager
def _hidden(module: nn.Module, is_ours: Callable[[Any], bool]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in _HOOKS}
    try:
        for name, hooks in before.items():
            setattr(module, name, OrderedDict((key, hook) for key, hook in hooks.items() if not is_ours(hook)))
        yield
    finally:
        for name, hooks in before.items():
            setattr(module, name, hooks)
