"""The user's code that a module needs: its source text, and the values of the globals that it reads."""

from __future__ import annotations

import ast
import contextlib
import dis
import enum
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...touch.whose_code import is_installed
from .encoding import Encoder, TooLargeError

MAX_FUNCTIONS = 5_000
MAX_BYTES = 8 << 20
"""Source text in a capsule."""


def gather(encoder: Encoder) -> dict[str, dict[str, Any]]:
    """The user's modules, by name: those that the encoded values need, with their globals; then the others."""
    reached = _Reached(encoder)
    reached.follow(list(encoder.code))
    found: dict[str, dict[str, Any]] = {}
    size = 0
    others = [name for name in tuple(sys.modules) if name not in reached.data]
    known: list[types.ModuleType] = []
    for name in [*reached.data, *others]:
        module = sys.modules.get(name)
        if module is None or module in known:  # __mp_main__ is __main__
            continue
        text = source_of(module) if is_users(module) else None
        if text is None or size + len(text) > MAX_BYTES:
            continue
        known.append(module)
        size += len(text)
        spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
        found[name] = {
            "file": str(Path(file).absolute()) if file else "",
            "name": spec.name if spec is not None else name,
            "package": getattr(module, "__package__", None) or "",
            "is_package": hasattr(module, "__path__"),
            "text": text,
            "globals": [[key, form] for key, form in reached.data.get(name, {}).items()],
        }
    return found


def source_of(module: types.ModuleType) -> str | None:
    """The source text of a module, or of all cells of a notebook."""
    file = getattr(module, "__file__", None)
    if file is None:
        cells = getattr(module, "In", None)
        return "\n\n".join(_without_magics(str(cell)) for cell in cells) if isinstance(cells, list) else None
    try:
        return Path(file).read_text(encoding="utf-8") if file.endswith(".py") else None
    except (OSError, UnicodeDecodeError):
        return None


def _without_magics(cell: str) -> str:
    """A cell as Python, without the commands of the notebook; nothing of one that never ran."""
    for text in (cell, re.sub(r"(?m)^([ \t]*)[%!].*$", r"\1pass", cell)):
        with contextlib.suppress(SyntaxError):
            ast.parse(text)
            return text
    return ""


def is_users(module: types.ModuleType) -> bool:
    """Whether a module is neither torch's, Python's, an installed package's nor ours."""
    if module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return False
    return not is_installed(file)


class _Reached:
    """Follows functions and classes to the globals that they read."""

    def __init__(self, encoder: Encoder) -> None:
        self.data: dict[str, dict[str, Any]] = {}
        """For each module that was reached, the values of its globals and of its classes' attributes that are data, as JSON."""
        self._encoder = encoder
        self._seen: set[int] = set()

    def follow(self, code: list[Any]) -> None:
        while code and len(self._seen) < MAX_FUNCTIONS:
            one = code.pop()
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            module = sys.modules.get(getattr(one, "__module__", None) or "")
            if module is None or not is_users(module):
                continue
            self.data.setdefault(module.__name__, {})
            if isinstance(one, type):
                code += [*one.__bases__, *_functions_of(one)]
                for name, value in _data_of(one):
                    self._store(module.__name__, f"{one.__qualname__}.{name}", value)
            elif isinstance(one, types.FunctionType):
                code += self._read_by(one.__code__, one.__globals__)

    def _read_by(self, code: types.CodeType, place: dict[str, Any]) -> list[Any]:
        found = []
        for inner in _codes(code):
            for name in _globals_of(inner):
                value = place.get(name)
                if isinstance(value, types.ModuleType):
                    if is_users(value):
                        found += self._read(value.__dict__, [one for one in inner.co_names if one in value.__dict__])
                elif name in place and not name.startswith("__"):
                    found += self._read(place, [name])
        return found

    def _read(self, place: dict[str, Any], names: Sequence[str]) -> list[Any]:
        """The functions and classes among these globals; what is data is stored."""
        found = []
        for name in names:
            value = place[name]
            if isinstance(value, (type, types.FunctionType)):
                found.append(value)
            elif not callable(value) and not isinstance(value, types.ModuleType):
                self._store(place.get("__name__", ""), name, value)
        return found

    def _store(self, module: str, name: str, value: Any) -> None:
        known = self.data.setdefault(module, {})
        if name in known:
            return
        before, self._encoder.with_texts = self._encoder.with_texts, True
        try:
            ((_, known[name]),) = self._encoder.state({name: value}, module, 0)
        except TooLargeError:
            known[name] = {"is": "absent", "absent": "too large", "path": f"{module}.{name}"}
        finally:
            self._encoder.with_texts = before


def _functions_of(cls: type) -> Iterator[Any]:
    for member in vars(cls).values():
        for one in (member, *(getattr(member, name, None) for name in ("__func__", "fget", "__wrapped__"))):
            if isinstance(one, types.FunctionType):
                yield one


def _data_of(cls: type) -> Iterator[tuple[str, Any]]:
    """The attributes of a class that are data: the training may have set them."""
    if "<locals>" in cls.__qualname__ or issubclass(cls, enum.Enum):
        return
    for name, value in vars(cls).items():
        if not (name.startswith("__") or callable(value) or hasattr(value, "__get__") or name == "_abc_impl"):
            yield name, value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


_EXTENDED, _LOAD, _SHIFT = dis.opmap["EXTENDED_ARG"], dis.opmap["LOAD_GLOBAL"], int(sys.version_info >= (3, 11))


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """The names of the globals that a function reads. ``dis`` would take a hundred times as long."""
    extended = 0
    for operator, argument in zip(code.co_code[::2], code.co_code[1::2]):  # noqa: B905
        argument |= extended
        extended = argument << 8 if operator == _EXTENDED else 0
        if operator == _LOAD:
            yield code.co_names[argument >> _SHIFT]
