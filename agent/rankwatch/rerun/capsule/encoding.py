"""Modules, inputs and plain values -> JSON and tensors, from which ``replay`` makes them again.

Nothing is pickled: a class or function is a name, an object is the name of its class and its attributes. What has no such form
(an open file, a process group, a data loader) is left out with its reason, and whoever needs it in a replay is told so.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import enum
import functools
import logging
import math
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...measure.extremes import dtype_name

MAX_VALUES = 200_000
MAX_VALUES_OF_OBJECT = 5_000
"""An attribute with more parts, such as a trainer, is no part of a module, but knows of it."""

MAX_DEPTH = 60

_NOT_STATE = vars(nn.Module()).keys() - {"training", "_non_persistent_buffers_set"} | {"_compiled_call_impl"}
"""Attributes that each module has: they are stored in another way, or not at all."""


class TensorBag:
    """The tensors of a capsule: each storage once, until the limit in bytes is reached. The first ones have priority."""

    def __init__(self, limit: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.left_out: list[str] = []
        self.bytes = 0
        self._limit = limit
        self._names: dict[Any, str] = {}

    def put(self, value: Tensor, path: str, *, with_values: bool) -> dict[str, Any]:
        """How this tensor is written in JSON."""
        form: dict[str, Any] = {
            "shape": list(value.shape),
            "dtype": dtype_name(value.dtype),
            "device": str(value.device),
            "grad": value.requires_grad,
        }
        why = _why_not(value)
        if why:
            self.left_out.append(f"{path} ({why})")
            return {**form, "absent": why}
        if type(value) not in (Tensor, nn.Parameter) and (name := name_of(type(value))):
            form["class"] = name
        form["stride"] = list(value.stride())
        if not with_values:
            return {**form, "absent": "without inputs", **_range(value)}
        stored = self._name_of(value, path)
        if stored is None:
            self.left_out.append(f"{path} ({_size(value)} are over the limit)")
            return {**form, "absent": f"its {_size(value)} are over the limit of {self._limit >> 20} MiB"}
        return {**form, "tensor": stored}

    def _name_of(self, value: Tensor, path: str) -> str | None:
        plain = value.detach()
        key = (plain.untyped_storage()._cdata, plain.storage_offset(), plain.shape, plain.stride(), plain.dtype)
        if key in self._names:
            return self._names[key]
        flat = _span(plain)
        size = flat.numel() * flat.dtype.itemsize
        if self.bytes + size > self._limit:
            return None
        self.bytes += size
        name = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
        self._names[key], self.tensors[name] = name, flat
        return name

    def mark(self) -> tuple[int, int, int]:
        return len(self.tensors), len(self.left_out), self.bytes

    def back_to(self, mark: tuple[int, int, int]) -> None:
        """Forgets what was put since ``mark``."""
        tensors, left_out, self.bytes = mark
        for name in list(self.tensors)[tensors:]:
            del self.tensors[name]
        self._names = {key: name for key, name in self._names.items() if name in self.tensors}
        del self.left_out[left_out:]


class TooLargeError(Exception):
    """A value with more parts than belong into a capsule."""


class Encoder:
    """Writes values as JSON; their tensors go into ``bag``.

    ``code`` collects the classes and functions that the values name, ``absent`` what was left out. ``with_tensors`` and
    ``with_texts`` tell what is stored from now on: they may be of the user's data. Of other tensors only the shape and range are.
    """

    def __init__(self, bag: TensorBag) -> None:
        self.bag = bag
        self.with_tensors = True
        self.with_texts = True
        self.code: list[Any] = []
        self.absent: list[str] = []
        self._ids: dict[int, int] = {}
        self._held: list[Any] = []  # so that no id is used again
        self._count = 0
        self._most = MAX_VALUES

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        self._count += 1
        if self._count > self._most:
            raise TooLargeError
        if value is None or type(value) in (bool, int):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) is str:
            return value if self.with_texts else self._absent("a text", path)
        if depth > MAX_DEPTH:
            return self._absent("nested too deep", path)
        if isinstance(value, Tensor):
            return {
                "is": "parameter" if isinstance(value, nn.Parameter) else "tensor",
                **self.bag.put(value, path, with_values=self.with_tensors),
            }
        return self._plain(value) or self._shared(value, path, depth)

    def _plain(self, value: Any) -> dict[str, Any] | None:
        """Values without parts."""
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, enum.Enum):
            return {"enum": self._name(type(value)), "member": value.name} if self._name(type(value)) else None
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        if type(value) in (bytes, bytearray) and self.with_texts:
            return {"bytes": base64.b64encode(value).decode()}
        if type(value) in (range, slice):
            parts = [value.start, value.stop, value.step]
            return {type(value).__name__: parts} if all(part is None or type(part) is int for part in parts) else None
        if value is Ellipsis or value is NotImplemented:
            return {"name": f"builtins:{value!r}"}
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return {"operator": str(value)}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, logging.Logger):
            return {"logger": value.name}
        if isinstance(value, _LOCKS):
            return {"lock": "Lock" if isinstance(value, _LOCKS[0]) else "RLock"}
        if isinstance(value, (type, *_FUNCTIONS)):
            name = self._name(value)
            return {"name": name} if name else None
        return None

    def _name(self, value: Any) -> str:
        name = name_of(value)
        if name:
            self.code.append(value)
        return name

    def _shared(self, value: Any, path: str, depth: int) -> Any:
        """Values with parts. One that occurs again is written once."""
        if id(value) in self._ids:
            return {"same": self._ids[id(value)]}
        number = self._ids[id(value)] = len(self._held)
        self._held.append(value)
        return {"id": number, **self._parts(value, path, depth + 1)}

    def _parts(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        kind = type(value)
        if kind in (list, tuple, set, frozenset, collections.deque):
            ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
            items = [self.encode(item, f"{path}[{index}]", depth) for index, item in enumerate(ordered)]
            return {"is": kind.__name__, "items": items, **({"maxlen": value.maxlen} if kind is collections.deque else {})}
        if kind in (dict, types.MappingProxyType):
            return {"is": "dict", "items": self._items(value, path, depth)}
        if isinstance(value, nn.Module):
            return self._module(value, path, depth)
        if isinstance(value, types.FunctionType):
            return self._local_function(value, path, depth)
        if isinstance(value, types.MethodType):
            owner = self.encode(value.__self__, path, depth)
            return {"is": "method", "of": owner, "name": value.__func__.__name__}
        if isinstance(value, type):
            return self._local_class(value, path, depth)
        if isinstance(value, functools.partial):
            parts = [self.encode(part, path, depth) for part in (value.func, list(value.args), dict(value.keywords))]
            return {"is": "partial", "parts": parts}
        if isinstance(value, torch.Generator):
            state = self.bag.put(value.get_state(), f"{path}.generator", with_values=True)
            return {"is": "generator", "device": str(value.device), "state": {"is": "tensor", **state}}
        if isinstance(value, weakref.ref):
            return {"is": "weakref", "to": self.encode(value(), path, depth)}
        if kind.__module__ == "numpy":
            return self._numpy(value, path)
        return self._object(value, path, depth)

    def _items(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        with_texts = self.with_texts
        found = []
        for key, item in value.items():
            self.with_texts = True  # a key is a name, not data
            name = self.encode(key, path, depth)
            self.with_texts = with_texts
            found.append([name, self.encode(item, f"{path}[{key}]", depth)])
        return found

    def _numpy(self, value: Any, path: str) -> dict[str, Any]:
        try:
            stored = self.bag.put(torch.as_tensor(value, device="cpu"), path, with_values=self.with_tensors)
        except (TypeError, ValueError, RuntimeError):
            return self._absent(f"a numpy {type(value).__name__}", path)
        return {"is": "array", "value": {"is": "tensor", **stored}, "scalar": not hasattr(value, "__len__")}

    def _object(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        """Any other object: its class and its attributes, and its items if it is a kind of dict, list or tuple."""
        kind: Any = type(value)
        said = len(self.absent)
        made = self.encode(kind, path, depth)
        has_name = isinstance(made, dict) and "absent" not in made
        state = attributes(value)
        base = next((one for one in (dict, list, tuple) if isinstance(value, one)), None)
        is_plain = base is not None or kind.__new__ is object.__new__ or dataclasses.is_dataclass(kind)
        if not has_name or not is_plain or (state is None and base is None):
            del self.absent[said:]
            return self._absent(f"{'an' if kind.__name__[:1] in 'AEIOU' else 'a'} {kind.__name__}", path)
        form: dict[str, Any] = {"is": "object", "class": made}
        if isinstance(value, collections.defaultdict):
            form["factory"] = self.encode(value.default_factory, path, depth)
        if base is dict:
            form["dict"] = self._items(dict(value), path, depth)
        elif base is not None:
            form[base.__name__] = [self.encode(item, f"{path}[{index}]", depth) for index, item in enumerate(value)]
        form["state"] = self.state(state or {}, path, depth)
        return form

    def state(self, attributes: Mapping[str, Any], path: str, depth: int) -> list[Any]:
        """Attributes, each on its own: one that is too large is left out, and the others are not."""
        found = []
        for name, item in attributes.items():
            count, most, mark, held = self._count, self._most, self.bag.mark(), len(self._held)
            self._most = min(most, count + MAX_VALUES_OF_OBJECT)
            try:
                form = self.encode(item, f"{path}.{name}", depth)
            except TooLargeError:
                if most <= count + MAX_VALUES_OF_OBJECT:
                    raise  # what is around it is too large
                self.bag.back_to(mark)
                self._ids = {key: number for key, number in self._ids.items() if number < held}
                self._count = count
                form = self._absent(f"a {type(item).__name__} of many parts", f"{path}.{name}")
            finally:
                self._most = most
            found.append([name, form])
        return found

    # --- modules ------------------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, path: str, depth: int) -> dict[str, Any]:
        kind: type = type(module)
        made_of: list[str] = []
        if "parametrizations" in module._modules:  # torch made a class for this module alone
            kind, made_of = kind.__bases__[0], [*module._modules["parametrizations"]._modules]  # type: ignore[union-attr]
        if type(module).__name__.startswith("FSDP"):
            return self._absent("a module of FSDP", path)
        most, self._most = self._most, MAX_VALUES
        form: dict[str, Any] = {"is": "nn.Module", "class": self.encode(kind, path, depth), "parametrized": made_of}
        for group in ("parameters", "buffers", "modules"):
            members: Mapping[str, Any] = getattr(module, f"_{group}")
            below = f"{path}." if path else ""
            form[group] = [[name, self._member(one, below + name, depth)] for name, one in members.items()]
        self._most = most
        state = {name: value for name, value in module.__dict__.items() if name not in _NOT_STATE}
        form["state"] = self.state(state, path, depth)
        form["hooks"] = [[name, self._hooks(module, name, path, depth)] for name in ("_forward_pre_hooks", "_forward_hooks")]
        return form

    def _member(self, member: Any, path: str, depth: int) -> Any:
        """A parameter, buffer or module. A tensor among its other attributes may be of the user's data; these are not."""
        before, self.with_tensors = self.with_tensors, self.with_tensors or isinstance(member, Tensor)
        form = self.encode(member, path, depth)
        self.with_tensors = before
        return form

    def _hooks(self, module: nn.Module, name: str, path: str, depth: int) -> list[Any]:
        """The user's hooks, in their order, up to the hook of the watch."""
        found = []
        for key, hook in getattr(module, name).items():
            if type(hook).__module__.startswith("rankwatch."):
                break
            form = self.encode(hook, f"{path}.{name}", depth)
            found.append({"hook": form, "with_kwargs": key in getattr(module, f"{name}_with_kwargs", ())})
        return found

    # --- code that has no name of its own ---

    def _local_function(self, value: types.FunctionType, path: str, depth: int) -> dict[str, Any]:
        code = value.__code__
        self.code.append(value)
        return {
            "is": "function",
            "in": value.__module__ or "",
            "line": code.co_firstlineno,
            "column": _column(code),
            "name": value.__name__,
            "free": self._items(dict(_free_in(value)), path, depth),
            "defaults": self.encode(value.__defaults__, path, depth),
            "kwdefaults": self.encode(value.__kwdefaults__, path, depth),
        }

    def _local_class(self, value: type, path: str, depth: int) -> dict[str, Any]:
        """A class that was defined in a function."""
        if "<locals>" not in value.__qualname__:
            return self._absent(f"the class {value.__name__}, which has no name in its module", path)
        free: dict[str, Any] = {one.__name__: one for one in value.__bases__ if not name_of(one)}
        for member in vars(value).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, types.FunctionType):
                free.update({name: one for name, one in _free_in(function) if name != "__class__" and one is not value})
        self.code.append(value)
        return {"is": "class", "in": value.__module__, "name": value.__qualname__, "free": self._items(free, path, depth)}

    def _absent(self, why: str, path: str) -> dict[str, Any]:
        self.absent.append(f"{path} ({why})")
        return {"is": "absent", "absent": why, "path": path}


_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_PLACES = {"torch:": torch, "torch.nn.functional:": nn.functional, "torch:Tensor.": Tensor}
"""Where torch's functions are that do not know their own names."""


def name_of(value: Any) -> str:
    """``module:qualname`` under which a class or function is found again; empty if there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module in sys.modules and name and _found(sys.modules[module], name) is value:
        return f"{module}:{name}"
    short = getattr(value, "__name__", "")
    return next((prefix + short for prefix, place in _PLACES.items() if short and getattr(place, short, None) is value), "")


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, also those in slots; None if it has none of its own."""
    found = dict(getattr(value, "__dict__", {}))
    given = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    slots = [name for names in given for name in ([names] if isinstance(names, str) else names)]
    found.update(
        {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)}
    )
    return found if hasattr(value, "__dict__") or slots else None


def _found(place: Any, path: str) -> Any:
    for name in path.split("."):
        place = getattr(place, name, None)
    return place


def _free_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of the functions around it that a function reads, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


def _column(code: types.CodeType) -> int:
    """The column of a lambda's body; -1 before Python 3.11."""
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return -1
    return min((column for line, _, column, _ in positions() if line == code.co_firstlineno and column), default=-1)


def _why_not(value: Tensor) -> str:
    """Why the values of a tensor cannot be stored; empty if they can."""
    if value.layout is not torch.strided or value.is_nested:
        return f"a tensor of the layout {str(value.layout).removeprefix('torch.')}"
    if value.is_meta or value.is_quantized or hasattr(type(value), "__tensor_flatten__") or hasattr(value, "to_local"):
        return f"a tensor of the kind {type(value).__name__}"
    if value.numel() and not value.untyped_storage().size():
        return "its memory was freed"
    return ""


def _span(value: Tensor) -> Tensor:
    """What is stored of a tensor: itself, or the memory between its first and last number, so that its strides stay."""
    if value.is_contiguous():
        return value
    end = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((end,), (1,)) if 0 < end <= value.numel() else value.contiguous()


def _range(value: Tensor) -> dict[str, Any]:
    """The smallest and largest finite number, for inputs in their place."""
    if not value.numel() or value.dtype.is_complex:
        return {}
    wide = value.detach().to(torch.float64)
    low, high = torch.aminmax(torch.nan_to_num(wide, 0.0, 0.0, 0.0))
    return {"low": low.item(), "high": high.item()}


def _size(value: Tensor) -> str:
    return f"{value.numel() * value.dtype.itemsize / (1 << 20):.1f} MiB"
