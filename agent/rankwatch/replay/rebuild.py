"""The forms of ``rerun.encoding`` -> modules, tensors and values. No constructor of the user's is called."""

from __future__ import annotations

import ast
import base64
import collections
import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .code import UsersCode, is_absent
from .definitions import definition_of
from .opened import OpenedCapsule

_ALLOCATED = 1 << 34
"""Numbers in a tensor: a form in a changed file must not ask for all memory."""


class Absent:
    """Stands where a value is not in the capsule. Whoever uses it is told so."""

    def __init__(self, path: str, why: str) -> None:
        self.__dict__["_text"] = (
            f"{path or 'a value'} is not in the capsule: {why}. --module MODULE:FUNCTION names a function that makes it"
        )

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(self.__dict__["_text"])

    __getattr__ = __call__ = __iter__ = __len__ = __bool__ = __getitem__ = __enter__ = __exit__ = _fail
    __eq__ = __lt__ = __gt__ = __add__ = __mul__ = __rmul__ = __radd__ = _fail
    __hash__ = None  # type: ignore[assignment]


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "torch": lambda name: getattr(torch, name),
    "size": torch.Size,
    "logger": logging.getLogger,
    "lock": lambda name: {"Lock": threading.Lock, "RLock": threading.RLock}[name](),
    "complex": lambda parts: complex(*parts),
    "bytes": base64.b64decode,
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "operator": lambda name: functools.reduce(getattr, name.split("."), torch.ops),
}
"""Makes values without parts, by the key of their forms."""

_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
"""Makes values of their items. They are made after these, as no item can refer to them."""


class Builder:
    """Makes values of their forms.

    Args:
        device: stands for a GPU that a value names.
        generator: draws numbers in the place of inputs that are not in the capsule.
    """

    def __init__(self, capsule: OpenedCapsule, code: UsersCode, device: torch.device, generator: torch.Generator) -> None:
        self._tensors = capsule.tensors
        self._forms = capsule.forms
        self._code = code
        self._device = device
        self._random = generator
        self._made: dict[int, Any] = {}
        self._known: dict[tuple[Any, ...], Tensor] = {}
        self.drawn: list[str] = []
        """The inputs that were drawn at random."""
        code.build_with(self.build)

    def build(self, form: Any) -> Any:
        if not isinstance(form, dict):
            return form
        if "same" in form:
            number = form["same"]
            return self._made[number] if number in self._made else self.build(self._forms[number])
        kind = form.get("is", "")
        if kind in ("tensor", "parameter"):
            return self._tensor(form, is_parameter=kind == "parameter")
        if is_absent(form):
            return Absent(form.get("path", ""), form["absent"])
        if not kind:
            return self._plain(form)
        if form.get("id") in self._made:  # a global of the training that is also an attribute
            return self._made[form["id"]]
        if kind in _COLLECTIONS:
            made = _COLLECTIONS[kind]([self.build(item) for item in form["items"]])
        else:
            made = getattr(self, f"_{kind.replace('nn.Module', 'module')}")(form)
        if "id" in form:
            self._made[form["id"]] = made
        return made

    def _plain(self, form: dict[str, Any]) -> Any:
        ((key, value), *rest) = form.items()
        if key in _PLAIN:
            return _PLAIN[key](value)
        if key == "enum":
            return self._code.find(value)[rest[0][1]]
        named: dict[str, Callable[[str], Any]] = {"device": self._on, "module": self._code.module, "name": self._code.find}
        if key in named:
            return named[key](value)
        raise UsageError(f"the capsule has a value of an unknown kind: {key}")

    def _on(self, device: str) -> torch.device:
        """The device that stands for one of the training."""
        return torch.device(device) if device in ("cpu", "meta") else self._device

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _tensor(self, form: dict[str, Any], is_parameter: bool) -> Any:
        key = (form.get("tensor"), is_parameter, tuple(form["shape"]), tuple(form.get("stride", ())), form["grad"])
        if form.get("tensor") is not None and key in self._known:
            return self._known[key]
        if is_absent(form):
            if "low" not in form:
                raise UsageError(f"a tensor of the shape {form['shape']} is not in the capsule: {form['absent']}")
            value = self._draw(form)
        else:
            stored = self._tensors[form["tensor"]]
            value = self._laid_out(stored if is_parameter else stored.clone(), form)  # a forward may write to it
        if "class" in form:
            value = value.as_subclass(self._code.find(form["class"]))
        if is_parameter:
            value = nn.Parameter(value, requires_grad=form["grad"])
        elif form["grad"]:
            value.requires_grad_()
        if form.get("tensor") is not None:
            self._known[key] = value
        return value

    def _laid_out(self, stored: Tensor, form: dict[str, Any]) -> Tensor:
        """With the strides that it had: some kernels compute in another order for others."""
        dtype, shape, stride = getattr(torch, form["dtype"]), form["shape"], form["stride"]
        if stored.dtype != dtype:
            stored = stored.view(dtype)
        if list(stored.shape) == shape and list(stored.stride()) == stride:
            return stored
        end = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if stored.dim() == 1 and stored.numel() == end:
            return stored.as_strided(shape, stride)
        if end > _ALLOCATED:
            raise UsageError(f"a tensor of the capsule has strides that span {end} numbers")
        made: Tensor = torch.empty_strided(shape, stride, dtype=dtype)
        made.copy_(stored.view(shape))
        return made

    def _draw(self, form: dict[str, Any]) -> Tensor:
        """Random numbers in the range of the input that is not in the capsule."""
        dtype, shape, low, high = getattr(torch, form["dtype"]), form["shape"], form["low"], form["high"]
        self.drawn.append(f"{tuple(shape)} {form['dtype']}")
        if dtype == torch.bool or not dtype.is_floating_point:
            return torch.randint(int(low), int(high) + 1, shape, generator=self._random).to(dtype)
        drawn: Tensor = torch.rand(shape, generator=self._random, dtype=torch.float64) * (high - low) + low
        if drawn.numel() > 1:
            drawn.view(-1)[0], drawn.view(-1)[-1] = low, high
        return drawn.to(dtype)

    # --- containers and objects ---

    def _list(self, form: dict[str, Any]) -> Any:
        made: list[Any] = []
        self._made[form["id"]] = made
        made += [self.build(item) for item in form["items"]]
        return made

    def _deque(self, form: dict[str, Any]) -> Any:
        return collections.deque(self._list(form), form["maxlen"])

    def _dict(self, form: dict[str, Any]) -> Any:
        made: dict[Any, Any] = {}
        self._made[form["id"]] = made
        made.update({self.build(key): self.build(item) for key, item in form["items"]})
        return made

    def _method(self, form: dict[str, Any]) -> Any:
        return getattr(self.build(form["of"]), form["name"])

    def _partial(self, form: dict[str, Any]) -> Any:
        function, args, kwargs = map(self.build, form["parts"])
        return functools.partial(function, *args, **kwargs)

    def _generator(self, form: dict[str, Any]) -> Any:
        made = torch.Generator(self._on(form["device"]))
        if made.device.type == torch.device(form["device"]).type:  # another kind has other states
            made.set_state(self.build(form["state"]))
        return made

    def _weakref(self, form: dict[str, Any]) -> Any:
        return weakref.ref(self.build(form["to"]))

    def _array(self, form: dict[str, Any]) -> Any:
        value = self.build(form["value"]).numpy()
        return value[()] if form["scalar"] else value

    def _object(self, form: dict[str, Any]) -> Any:
        cls = self.build(form["class"])
        if "tuple" in form:
            items = [self.build(item) for item in form["tuple"]]
            made = tuple.__new__(cls, items) if cls.__new__ is tuple.__new__ or hasattr(cls, "_fields") else cls(items)
        else:
            base: Any = next(one for one in (list, OrderedDict, dict, object) if issubclass(cls, one))
            made = base.__new__(cls)
            if "factory" in form:
                made.default_factory = self.build(form["factory"])
            if "list" in form:
                list.extend(made, [self.build(item) for item in form["list"]])
            for key, item in form.get("dict", ()):
                base.__setitem__(made, self.build(key), self.build(item))
        self._made[form["id"]] = made
        for name, item in form["state"]:
            object.__setattr__(made, name, self.build(item))
        return made

    # --- modules ---

    def _module(self, form: dict[str, Any]) -> nn.Module:
        if is_absent(form["class"]):
            raise UsageError(
                f"{form['class']['path'] or 'the module'} cannot be made: {form['class']['absent']}. Define it at the top of a "
                "file or notebook, or name a function that makes the module by --module MODULE:FUNCTION"
            )
        cls = self.build(form["class"])
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise UsageError(f"{cls} is no torch.nn.Module")
        if form["id"] in self._made:  # a global that is read by its class
            return self._made[form["id"]]  # type: ignore[no-any-return]
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        self._made[form["id"]] = module
        for group in ("parameters", "buffers", "modules"):
            members = getattr(module, f"_{group}")
            for name, item in form[group]:
                members[name] = self.build(item)
        for name, item in form["state"]:
            module.__dict__[name] = self.build(item)
        parametrize = torch.nn.utils.parametrize
        for number, tensor in enumerate(form["parametrized"]):
            if not number:
                parametrize._inject_new_class(module)
            parametrize._inject_property(module, tensor)
        for name, hooks in form["hooks"]:
            for one in hooks:
                register = module.register_forward_hook if name == "_forward_hooks" else module.register_forward_pre_hook
                register(self._bearable(self.build(one["hook"])), with_kwargs=one["with_kwargs"])
        return module

    def _bearable(self, hook: Any) -> Any:
        """A hook of a library may need what no capsule has, such as attributes of parameters: it is then left out, and named."""
        name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__name__)}"
        code = getattr(getattr(hook, "__func__", hook), "__code__", None)
        if code is None or "-packages" not in code.co_filename:  # of site-packages: repro.py has no more of ours than this
            return hook

        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except AttributeError as error:
                self._code.tell(f"left out: the hook {name}, which needs what the capsule does not have: {error}")
                return None

        return called

    def fill_by_name(self, module: nn.Module, form: dict[str, Any]) -> nn.Module:
        """Gives a module that the user's function made the parameters and buffers of the capsule."""
        members = dict(_members(form))
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        missing = sorted(name for name in own if name not in members)
        if missing:
            raise UsageError(
                f"the capsule has no {', '.join(missing[:4])}: --module makes another module than the training had"
            )
        for name, value in own.items():
            if is_absent(members[name]):  # left out by the limit: the function may load it from a checkpoint
                continue
            given = self.build(members[name])
            if given.shape != value.shape:
                raise UsageError(
                    f"{name} has the shape {tuple(given.shape)} in the capsule, --module makes {tuple(value.shape)}"
                )
            value.data = given.detach().clone()
        return module.train(dict(form["state"]).get("training", True))

    # --- code without a name of its own ---

    def _function(self, form: dict[str, Any]) -> Any:
        made = self._class(form)
        made.__defaults__, made.__kwdefaults__ = self.build(form["defaults"]), self.build(form["kwdefaults"])
        return made

    def _class(self, form: dict[str, Any]) -> Any:
        """A class, function or lambda that was defined in a function."""
        name, free = form["in"], {self.build(key): self.build(item) for key, item in form["free"]}
        self._code.module(name)
        node = definition_of(form, self._code.text_of(name))
        if node is None:
            at = f"at line {form['line']} of" if "line" in form else "in"
            raise UsageError(f"{form['name']} is no longer {at} {self._code.file_of(name)}")
        return self._defined(name, node, form["name"].rpartition(".")[2], free)

    def _defined(self, module: str, node: Any, name: str, free: dict[str, Any]) -> Any:
        """What a statement or lambda inside of a function defines, with its free variables."""
        for used in {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - free.keys():
            self._code.module(module, used)
        tree = ast.parse(f"def _outer({', '.join(free)}): ...")
        outer: Any = tree.body[0]
        outer.body = [ast.Return(node)] if isinstance(node, ast.Lambda) else [node, ast.Return(ast.Name(name, ast.Load()))]
        tree = ast.fix_missing_locations(tree)
        place = vars(self._code.module(module))
        defined: dict[str, Any] = {}
        exec(compile(tree, self._code.file_of(module), "exec"), place, defined)
        return defined["_outer"](**free)


def _members(form: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The parameters and buffers below a module, by name."""
    for group in ("parameters", "buffers"):
        yield from ((f"{prefix}{name}", item) for name, item in form[group] if item is not None)
    for name, item in form["modules"]:
        if isinstance(item, dict) and item.get("is") == "nn.Module":
            yield from _members(item, f"{prefix}{name}.")
