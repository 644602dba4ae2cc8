"""Finds buffers that nobody has written since ``to_empty`` or ``torch.empty`` made them: a table of angles, say, which a
checkpoint does not have. Of ``torch.empty`` where its call, or a variable that is nothing else, is given to
``register_buffer``: no tensor says who made it.

Such a buffer holds what was in memory, which is another thing on each rank. Its numbers may well be finite, so they say nothing:
what is looked at is whether they were ever written. One that is all zeros is not told, as nobody knows whether that is meant.
"""

from __future__ import annotations

import ast
import linecache
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import islice
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..judge.events import OutputsCame
from ..measure.modules import Modules, class_name
from ..shared.bounded import BoundedDict
from ..shared.types.notice import NEVER_WRITTEN, Notice, NoticeKind
from ..touch.parts import modules_in
from ..touch.patched import patch
from ..touch.source import definition_of, inside

MOST_BYTES = 1 << 22
"""Of a buffer that is looked at: tables of angles are smaller."""

MOST = 4096
"""Buffers that are remembered."""

log = logging.getLogger(__name__)

_made = BoundedDict[tuple[int, str], tuple["ref[nn.Module]", int, bytes]](MOST)
"""By the ``id`` of a module and the name of a buffer that was made empty: its version, and a digest of what was in memory.
By these, as ``to`` puts a copy in its place."""

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
_KEPT = frozenset({"to", "cuda", "cpu", "contiguous", "view", "reshape", "unsqueeze"})
"""Methods of a tensor that may be called upon it, and write nothing of their own."""

Place = tuple[int | None, int | None, int | None, int | None]
"""Of an instruction: its first and last line, and in these where it begins and ends, in bytes."""

_are_empty = BoundedDict[tuple[CodeType, int], bool](MOST)
"""By the place of a call of ``register_buffer``: whether it is given what ``torch.empty`` made."""


class Unwritten:
    """Looks once, as the first batch returns: what a forward writes, it has written by then."""

    events = (OutputsCame,)

    def __init__(self, model: Modules, notify: Callable[[Notice], None]) -> None:
        self._model = model
        self._notify = notify
        self._has_looked = False

    def on(self, event: OutputsCame) -> None:
        if self._has_looked or not _made:
            return
        self._has_looked, batch = True, event.part.batch.position.batch
        for named in self._model.modules:
            for name, value in named.module._buffers.items():
                if value is not None and _is_unwritten(named.module, name, value):
                    about = named.names[0], class_name(named.module), name, str(value.dtype).removeprefix("torch.")
                    self._notify(Notice(NoticeKind.BUFFER, *about, batch, batch, 0.0, 0.0, NEVER_WRITTEN))


def remember_empty() -> None:
    """Wraps ``to_empty`` and ``register_buffer``, once for the process."""
    patch(nn.Module, "to_empty", _emptying)
    patch(nn.Module, "register_buffer", _registering)


def _emptying(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_empty(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        for module in modules_in(self):
            for name in module._buffers:
                _remember(module, name)
        return made

    return to_empty


def _registering(original: Callable[..., Any]) -> Callable[..., Any]:
    def register_buffer(self: nn.Module, name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(self, name, tensor, *args, **kwargs)
        if not torch.compiler.is_dynamo_compiling() and type(tensor) is Tensor:
            try:
                if not tensor._version and _is_given_empty(sys._getframe(1)):
                    _remember(self, name)
            except Exception:  # such as of a tensor of inference mode, which has no version
                log.debug("a buffer is not looked at", exc_info=True)
        return done

    return register_buffer


def _is_given_empty(frame: FrameType) -> bool:
    """Whether the call of ``register_buffer`` in this frame has a call of ``torch.empty`` as its tensor, by its source."""
    place = frame.f_code, frame.f_lasti
    if place not in _are_empty:
        _are_empty[place] = _makes_empty(_source_at(*place), frame.f_code)
    return _are_empty[place]


def _source_at(code: CodeType, instruction: int) -> str:
    """The source of the call; empty: Python 3.10 does not know it, or nobody has it."""
    positions: Iterator[Place] = getattr(code, "co_positions", lambda: iter(()))()
    first, last, begin, end = next(islice(positions, instruction // 2, None), (None,) * 4)
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[(first or 1) - 1 : last]]
    if first is None or begin is None or not lines:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode()


def _makes_empty(source: str, code: CodeType) -> bool:
    try:
        call = ast.parse(f"({source})", mode="eval").body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(call, ast.Call):
        return False
    given = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "tensor")]
    return bool(given) and _is_empty(given[0], code)


def _is_empty(made: ast.expr | None, code: CodeType) -> bool:
    """Whether an expression in this function is a call of ``torch.empty``, or a variable that is nothing else."""
    if isinstance(made, ast.Name) and made.id not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        values = list(_values_of(made.id, code))
        return bool(values) and all(isinstance(value, ast.Call) and _is_empty(value, code) for value in values)
    while isinstance(made, ast.Call):
        function = made.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in _EMPTY:
            return True
        made = function.value if isinstance(function, ast.Attribute) and name in _KEPT else None
    return False


def _values_of(name: str, code: CodeType) -> Iterator[ast.expr | None]:
    """What a function gives a variable; None: by another way than an assignment."""
    body = list(inside(node)) if (node := definition_of(code)) is not None else []
    given = {id(target): one.value for one in body if isinstance(one, ast.Assign) for target in one.targets}
    for one in body:
        if isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, (ast.Store, ast.Del)):
            yield given.get(id(one))


def _remember(module: nn.Module, name: str) -> None:
    value = module._buffers[name]
    held = None if value is None else _digest(value)
    if value is not None and held is not None:
        key = id(module), name
        _made[key] = ref(module, partial(_forget, key)), value._version, held


def _forget(key: tuple[int, str], _: Any) -> None:
    _made.pop(key, None)


def _is_unwritten(module: nn.Module, name: str, value: Tensor) -> bool:
    found = _made.get((id(module), name))
    return found is not None and found[0]() is module and found[1] == value._version and found[2] == _digest(value)


def _digest(value: Tensor) -> bytes | None:
    """None: it is too large, has no memory of its own, or is all zeros."""
    if type(value) is not Tensor or value.is_meta or value.layout is not torch.strided or not value.numel():
        return None
    if value.numel() * value.element_size() > MOST_BYTES:
        return None
    held = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return blake2b(held).digest() if any(held) else None
