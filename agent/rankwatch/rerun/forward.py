"""A forward that can be run again: the module, what it was given, and what was around it as it began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ..measure.walk import flatten
from ..touch.parts import modules_in
from ..touch.torch_private import is_any_autocast_enabled
from .careful import refusal
from .user_line import Caller, caller_of


class RootEntry:
    """The forward of a root as it began. Made in each batch: it refers to what the root was given, and copies nothing of it."""

    __slots__ = (
        *("_autocast", "_counters", "_seen", "_versions"),
        *("args", "caller", "forward", "has_gradients", "kwargs", "module", "random_state"),
    )

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module = module
        self.forward = module.forward  # a framework may replace it during this call alone
        self.args = args
        self.kwargs = kwargs
        found: list[Any] = [*args, *kwargs.values()] if kwargs else list(args)
        if not all([type(value) is Tensor for value in found]):
            found = []
            flatten((args, kwargs), found)
        self._versions = [(one, one._version) for one in found if isinstance(one, Tensor) and not one.is_inference()]
        has_cuda = torch.cuda.is_initialized()
        self.random_state = _random_state(has_cuda)
        """The state of torch's random numbers, by device."""
        self._autocast = _autocast(has_cuda) if is_any_autocast_enabled() else []
        self.has_gradients = torch.is_grad_enabled()
        self.caller = caller_of()
        known = _counters.get(module)
        self._seen = _numbers(module) if known is None else []
        self._counters = [(one, name, vars(one).get(name)) for kept, name in known or () if (one := kept()) is not None]

    def leave(self) -> None:
        """The forward has returned. After the first one, it is known which numbers its modules count."""
        if self.module not in _counters:
            self._counters = [row for row in self._seen if vars(row[0]).get(row[1]) != row[2]]
            _counters[self.module] = [(ref(one), name) for one, name, _ in self._counters]
            self._seen = []

    @property
    def given(self) -> list[Tensor]:
        """The tensors that the root was given."""
        return [value for value, _ in self._versions]

    @property
    def is_changed(self) -> bool:
        """Whether what the root was given was changed in place since."""
        return any(value._version != version for value, version in self._versions)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Random state, autocast, and what its modules count, as they were. What they count is put back at the end."""
        now = [(vars(one), name, vars(one).get(name)) for one, name, _ in self._counters]
        for one, name, value in self._counters:
            vars(one)[name] = value
        with ExitStack() as stack:
            for attributes, name, value in now:
                stack.callback(attributes.__setitem__, name, value)
            for device, state in self.random_state.items():
                if device == "cpu":
                    torch.set_rng_state(state)
                else:
                    torch.cuda.set_rng_state(state, device)
            was_on = dict(self._autocast)
            for device in ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",):
                stack.enter_context(torch.autocast(device, dtype=was_on.get(device), enabled=device in was_on))
            yield


_counters: WeakKeyDictionary[nn.Module, list[tuple[ref[nn.Module], str]]] = WeakKeyDictionary()
"""The plain numbers of modules that a forward of this root changes: calls that are counted, say."""


def _numbers(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [
        (inner, name, value)
        for inner in modules_in(module)
        for name, value in vars(inner).items()
        if type(value) in (int, float, bool)
    ]


def _autocast(has_cuda: bool) -> list[tuple[str, torch.dtype]]:
    devices = ("cpu", "cuda") if has_cuda else ("cpu",)
    return [(device, torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)]


def _random_state(has_cuda: bool) -> dict[str, Tensor]:
    states = {"cpu": torch.default_generator.get_state()}
    if has_cuda and not torch.cuda.is_current_stream_capturing():
        index = torch.cuda.current_device()
        states[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
    return states


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward whose output was bad in ``label``, or in which something else was.

    ``inner`` is a module that it called, for the ``nth`` time, and whose output was bad; or the label of a tensor that was
    marked in it. None: its own output was. ``entry`` is there if the module is the root. ``is_live``: the call that it
    repeats is still on the stack.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    label: str
    inner: nn.Module | str | None = None
    nth: int = 1
    entry: RootEntry | None = None
    is_live: bool = True

    @property
    def refusal(self) -> str:
        """Why it must not be run again; empty: it may."""
        if self.entry is not None and self.entry.is_changed:
            return "what the model was given has been changed in place since"
        return refusal(self.module, self.args, self.kwargs)

    def caller_of_operator(self) -> Caller | None:
        """The user's line that called the operator which runs now in this forward."""
        if self.entry is not None:
            return caller_of(within_run=True) or self.entry.caller
        return caller_of(within_run=not self.is_live)
