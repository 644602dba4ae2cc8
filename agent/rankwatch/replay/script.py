"""A capsule -> ``repro.py``: a script that needs torch alone, and makes the inf or nan again."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..rerun.capsule.capsule import TENSORS
from .backward_script import end_of_backward
from .code import is_absent
from .definitions import definition_of, needed
from .opened import OpenedCapsule
from .script_text import FIRST, HEAD, IS_BAD, LAYOUT, LOAD, MODULE, OBJECT, PARAMETER

_HELPERS = (LAYOUT, PARAMETER, MODULE, OBJECT)

_PLAIN = {
    "float": "float({!r})", "torch": "torch.{}", "size": "torch.Size({!r})", "complex": "complex(*{!r})",
    "bytes": "__import__('base64').b64decode({!r})", "range": "range(*{!r})", "slice": "slice(*{!r})", "operator": "torch.ops.{}",
    "logger": "__import__('logging').getLogger({!r})", "lock": "__import__('threading').{}()",
}  # fmt: skip
"""Values without parts, by the key of their forms."""

_SEQUENCES = {"list": "[{}]", "tuple": "({})", "set": "set([{}])", "frozenset": "frozenset([{}])"}

_FLAGS = (
    ("default_dtype", "float32", "torch.set_default_dtype(torch.{})"),
    ("matmul_precision", "highest", "torch.set_float32_matmul_precision({!r})"),
    ("deterministic", False, "torch.use_deterministic_algorithms({}, warn_only=True)"),
    ("flush_denormal", False, "torch.set_flush_denormal({})"),
)
"""What is set around a forward: its name in the capsule, torch's default, and how it is set."""


def write_script(
    path: Path, capsule: OpenedCapsule, texts: Mapping[str, str], *, rows: tuple[int, int, int] | None, draws: bool
) -> None:
    """Writes the script.

    Args:
        texts: the source texts of the user's modules, as they are here.
        rows: the rows that are enough (from, to before, of how many); None: all.
        draws: the module draws random numbers.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(_Script(path, capsule, texts, rows, draws).text(), encoding="utf-8")


@dataclass
class _Script:
    path: Path
    capsule: OpenedCapsule
    texts: Mapping[str, str]
    rows: tuple[int, int, int] | None
    draws: bool
    is_input: bool = False
    """Whether a value is one of the inputs, of which some rows are enough."""
    imports: dict[str, None] = field(default_factory=dict)
    source: list[str] = field(default_factory=list)
    """The code of the training."""
    statements: list[str] = field(default_factory=list)
    """They make the module and its inputs."""
    inlined: dict[str, str] = field(default_factory=dict)
    """The module of each name whose definition was copied."""
    done: set[tuple[str, int | str]] = field(default_factory=set)
    """Statements, by line, and globals that were copied, with their modules."""
    names: dict[int, str] = field(default_factory=dict)
    """The values that have a name, by the number of their form."""
    needs_path: bool = False
    gradients: str = ""
    """What the backwards are handed, by the number of the output."""
    open: list[int] = field(default_factory=list)
    """The objects that are being made, by the number of their forms."""
    later: list[tuple[int, int, str, Any]] = field(default_factory=list)
    """Attributes: the object that each waits for, the object that it belongs to, its name and form."""
    helpers: set[str] = field(default_factory=lambda: {MODULE})

    def __post_init__(self) -> None:
        self.code = self.capsule.manifest["code"]
        self.json = json.dumps([self.capsule.manifest[key] for key in ("module", "args", "kwargs", "gradients", "code")])

    def text(self) -> str:
        manifest, trip = self.capsule.manifest, self.capsule.trip
        module = self._value(manifest["module"])
        self.is_input = True
        args, kwargs = self._value(manifest["args"]), self._value(manifest["kwargs"])
        backwards = [", ".join(f"{number}: {self._value(form)}" for number, form in one) for one in manifest["gradients"]]
        self.gradients = f"[{', '.join(f'{{{one}}}' for one in backwards)}]"
        self._set_imported()
        around, end = self._around(), self._end()
        where = f"{manifest['name'] or '(root)'} ({manifest['class']})"
        what = "backward" if backwards else "forward"
        beside = self.path.parent.resolve() == self.capsule.path.resolve()
        file = (
            'Path(__file__).parent / "tensors.safetensors"' if beside else repr(str(self.capsule.path.resolve() / TENSORS))
        )
        folders = [
            one for one in manifest["path"] if Path(one).is_dir() and not one.startswith((sys.prefix, sys.base_prefix))
        ]
        paths = [f"sys.path += {folders!r}", ""] if self.needs_path and folders else []
        parts = [
            HEAD.format(what=what, where=where, state=trip["state"], rank=manifest["rank"], batch=trip["batch"],
                         torch=manifest["versions"]["torch"], device=self._device()),
            "\n".join([*paths, *sorted(self.imports)]) + "\n" if self.imports else "",
            "\n\n".join(["", LOAD.format(file=file), *[one for one in _HELPERS if one in self.helpers], IS_BAD, FIRST]),
            "\n\n".join(["", "# --- the code of the training ---", *self.source, ""]) if self.source else "",
            "\n\n# --- the module and its inputs ---\n",
            "\n".join([*self.statements, f"module = {module}", f"args, kwargs = {args}, {kwargs}"]) + "\n",
            around,
            end,
        ]  # fmt: skip
        return "\n".join(part for part in parts if part)

    def _device(self) -> str:
        """Where it runs; a GPU, if the training used one and the reader has one."""
        devices = sorted(set(re.findall(r'"device": "(cuda:\d+)"', self.json)))
        return f'"cuda" if torch.cuda.is_available() else "cpu"  # the training ran on {devices[0]}' if devices else '"cpu"'

    def _set_imported(self) -> None:
        """The globals of modules that are imported, of which the code is not here."""
        for module, about in self.code.items() if self.needs_path else ():
            if module != "__main__" and module not in self.inlined.values():
                known = [(name, form) for name, form in about["globals"] if not is_absent(form)]
                self.imports.update({f"import {module}": None} if known else {})
                self.statements += [f"{module}.{name} = {self._value(form)}" for name, form in known]

    def _around(self) -> str:
        """The flags that are not torch's defaults, and the random state."""
        by, random = self.capsule.manifest["surroundings"], self.capsule.manifest["random"]
        lines = [text.format(by[name]) for name, default, text in _FLAGS if by[name] != default]
        if self.draws:
            lines.append(f"torch.set_rng_state(tensors[{random['cpu']['tensor']!r}].cpu())")
            drawn = [form["tensor"] for name, form in random.items() if name != "cpu"]
            lines += [f'if DEVICE != "cpu":\n    torch.cuda.set_rng_state(tensors[{name!r}].cpu())' for name in drawn[:1]]
        return "\n".join(["", *lines, ""]) if lines else ""

    def _end(self) -> str:
        by, label, inner = (self.capsule.manifest[key] for key in ("surroundings", "label", "inner"))
        places = {"cpu": '"cpu"', "cuda": 'DEVICE.partition(":")[0]'}
        modes = [f"torch.set_grad_enabled({by['grad']})"]
        modes += [
            f"torch.autocast({places[device]}, dtype=torch.{dtype})"
            for device, (is_on, dtype) in by["autocast"].items()
            if is_on
        ]
        if self.capsule.manifest["gradients"]:
            self.imports["import dataclasses"] = None
            return end_of_backward(self.gradients, modes)
        before, what = "", label if re.fullmatch(r"output(\[\d+\]|\.\w+)*", label) else "output"
        if inner is not None:
            before = (
                "\nreached = []\n"
                f"inner = module.get_submodule({inner['name']!r})\n"
                "inner.register_forward_hook(lambda module, args, output: reached.append(output))\n"
            )
            what = what.replace("output", f"reached[{inner['nth'] - 1}]")
        call = "    output = module(*args, **kwargs)\n"
        if inner is not None:  # what comes after it is not looked at
            call = (
                f"    try:\n    {call}    except Exception:\n        if len(reached) < {inner['nth']}:\n            raise\n"
            )
        return (
            f"{before}\nwith {', '.join(modes)}, First():\n"
            f"{call}"
            f"outputs = tree_leaves({what})\n"
            'print("inf or nan:", any(map(is_bad, outputs)))\n'
            "sys.exit(0 if any(map(is_bad, outputs)) else 1)\n"
        )

    # --- values -------------------------------------------------------------------------------------------------------

    def _value(self, form: Any) -> str:
        if not isinstance(form, dict):
            return repr(form)
        if "same" in form:
            return self.names.get(form["same"]) or self._value(self.capsule.forms[form["same"]])
        if is_absent(form):
            return "None"
        kind = form.get("is", "")
        if not kind:
            return self._plain(form)
        if form.get("id") in self.names:  # a global of the training that is also an attribute
            return self.names[form["id"]]
        text = getattr(self, f"_{kind.replace('nn.Module', 'module')}")(form)
        if "id" not in form:
            return str(text)
        name = f"v{form['id']}"
        if text == name:  # a module, which is a statement already
            return name
        self.names[form["id"]] = name
        if (
            kind in ("tuple", "list", "dict", "set", "frozenset", "method", "weakref")
            and len(text) < 100
            and not self._is_shared(form)
        ):
            self.names[form["id"]] = text
            return str(text)
        self.statements.append(f"{name} = {text}")
        self._close(form["id"])
        return name

    def _state(self, form: dict[str, Any]) -> list[str]:
        """The attributes of an object. One that refers to what is not made yet, as to itself, comes when it is."""
        found = []
        if form["id"] not in self.open:
            self.open.append(form["id"])
        for name, item in form["state"]:
            text = json.dumps(item)
            waits_for = next((number for number in self.open if f'"same": {number}}}' in text), None)
            if waits_for is not None:
                self.later.append((waits_for, form["id"], name, item))
            elif str(name).isidentifier() and not is_absent(item):
                found.append(f"{name}={self._value(item)}")
        return found

    def _close(self, number: int) -> None:
        """An object is made."""
        if number in self.open:
            self.open.remove(number)
        waiting = [row for row in self.later if row[0] == number]
        self.later = [row for row in self.later if row[0] != number]
        self.statements += [f"object.__setattr__(v{of}, {name!r}, {self._value(item)})" for _, of, name, item in waiting]

    def _is_shared(self, form: dict[str, Any]) -> bool:
        return f'"same": {form["id"]}}}' in self.json

    def _plain(self, form: dict[str, Any]) -> str:
        ((key, value), *rest) = form.items()
        if key in _PLAIN:
            return _PLAIN[key].format(value)
        if key == "device":
            return f"torch.device({value!r})" if value in ("cpu", "meta") else "torch.device(DEVICE)"
        if key == "enum":
            return f"{self._named(value)}[{rest[0][1]!r}]"
        if key == "module":
            self.imports[f"import {value}"] = None
            return str(value)
        return self._named(value)

    def _tensor(self, form: dict[str, Any]) -> str:
        name, shape, cut = form["tensor"], form["shape"], ""
        if self.rows is not None and self.is_input and shape and shape[0] == self.rows[2]:
            cut = f"[{self.rows[0]}:{self.rows[1]}]"
        layout = self._layout(form)
        text = f"laid_out({name!r}, {layout})" if layout else f"tensors[{name!r}]"
        return f"{text}{cut}.requires_grad_()" if form["grad"] else f"{text}{cut}"

    def _layout(self, form: dict[str, Any]) -> str:
        """The layout of a tensor, if it is not that which was stored."""
        stored = self.capsule.tensors[form["tensor"]]
        shape, stride, dtype = form["shape"], form["stride"], f"torch.{form['dtype']}"
        if (list(stored.shape), list(stored.stride()), str(stored.dtype)) == (shape, stride, dtype):
            return ""
        self.helpers.add(LAYOUT)
        return f"shape={tuple(shape)!r}, stride={tuple(stride)!r}, dtype={dtype}"

    def _parameter(self, form: dict[str, Any]) -> str:
        self.helpers.add(PARAMETER)
        self.imports["import functools"] = None
        layout = self._layout(form)
        parts = [repr(form["tensor"]), *([] if form["grad"] else ["False"]), *([layout] if layout else [])]
        return f"parameter({', '.join(parts)})"

    def _sequence(self, form: dict[str, Any]) -> str:
        items = [self._value(item) for item in form["items"]]
        return _SEQUENCES[form["is"]].format(", ".join(items) + ("," if form["is"] == "tuple" and len(items) == 1 else ""))

    _list = _tuple = _set = _frozenset = _sequence

    def _deque(self, form: dict[str, Any]) -> str:
        self.imports["from collections import deque"] = None
        return f"deque([{', '.join(map(self._value, form['items']))}], {form['maxlen']})"

    def _dict(self, form: dict[str, Any]) -> str:
        return self._pairs(form["items"])

    def _pairs(self, pairs: Iterable[Any]) -> str:
        return f"{{{', '.join(f'{self._value(key)}: {self._value(item)}' for key, item in pairs)}}}"

    def _method(self, form: dict[str, Any]) -> str:
        return f"{self._value(form['of'])}.{form['name']}"

    def _partial(self, form: dict[str, Any]) -> str:
        self.imports["import functools"] = None
        function, args, kwargs = map(self._value, form["parts"])
        return f"functools.partial({function}, *{args}, **{kwargs})"

    def _generator(self, form: dict[str, Any]) -> str:
        if form["device"] != "cpu":
            return "torch.Generator(DEVICE)"
        return f"torch.Generator().set_state(tensors[{form['state']['tensor']!r}].cpu())"

    def _weakref(self, form: dict[str, Any]) -> str:
        self.imports["import weakref"] = None
        return f"weakref.ref({self._value(form['to'])})"

    def _array(self, form: dict[str, Any]) -> str:
        return f"{self._value(form['value'])}.cpu().numpy(){'[()]' if form['scalar'] else ''}"

    def _object(self, form: dict[str, Any]) -> str:
        self.helpers.add(OBJECT)
        self.imports["from collections import OrderedDict"] = None
        parts = [self._value(form["class"])]
        if "factory" in form:
            parts[0] = "dict"  # an ordinary one does
        if "dict" in form:
            parts.append(self._pairs(form["dict"]))
        parts += [f"[{', '.join(map(self._value, form[name]))}]" for name in ("list", "tuple") if name in form]
        return f"new({', '.join([*parts, *self._state(form)])})"

    def _module(self, form: dict[str, Any]) -> str:
        """A module is a statement, so that its parts can be read one after the other."""
        self.open.append(form["id"])
        groups = [self._pairs(form[group]) for group in ("parameters", "buffers", "modules")]
        state = [one for one in self._state(form) if one != "_non_persistent_buffers_set=set([])"]
        parts = ", ".join([self._value(form["class"]), *groups, *state])
        name = self.names[form["id"]] = f"v{form['id']}"
        self.statements.append(f"{name} = make({parts})")
        self._close(form["id"])
        for number, tensor in enumerate(form["parametrized"]):
            if not number:
                self.statements.append(f"torch.nn.utils.parametrize._inject_new_class({name})")
                self.imports["import torch.nn.utils.parametrize"] = None
            self.statements.append(f"torch.nn.utils.parametrize._inject_property({name}, {tensor!r})")
        for kind, hooks in form["hooks"]:
            for one in hooks:
                if not is_absent(one["hook"]):
                    register = kind.removeprefix("_").removesuffix("s")
                    hook = self._value(one["hook"])
                    self.statements.append(f"{name}.register_{register}({hook}, with_kwargs={one['with_kwargs']})")
        return name

    # --- code ---------------------------------------------------------------------------------------------------------

    def _named(self, name: str) -> str:
        module, _, path = name.partition(":")
        if module == "builtins":
            return path
        top = path.partition(".")[0]
        if self._inline(module, top):
            return path
        self.imports[f"import {module}"] = None
        self.needs_path |= module in self.code
        return f"{module}.{path}"

    def _inline(self, module: str, name: str) -> bool:
        """Copies a definition of the user's into the script, with all that it needs; returns whether it could."""
        text = self.texts.get(module)
        if text is None or self.inlined.get(name, module) != module:
            return False
        if name in self.inlined:
            return True
        self.inlined[name] = module
        tree = ast.parse(text)
        known = {key: form for key, form in self.code[module]["globals"] if not is_absent(form)}
        statements = needed(tree, {name}, set(known))
        for statement in statements:
            for one in ast.walk(statement):
                if isinstance(one, ast.Name) and one.id in known and (module, one.id) not in self.done:
                    self.done.add((module, one.id))
                    self._set_global(one.id, known[one.id])
        for statement in statements:
            if (module, statement.lineno) in self.done:
                continue
            self.done.add((module, statement.lineno))
            if isinstance(statement, ast.ImportFrom) and self._is_copied(statement, module):
                continue
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                if getattr(statement, "module", "") != "__future__":
                    absolute = self._absolute(statement, module)
                    self.imports[ast.unparse(absolute)] = None
                    roots = [getattr(absolute, "module", None) or alias.name for alias in absolute.names]
                    self.needs_path |= any(root in self.code for root in roots)
                continue
            self.source.append(_segment(text, statement))
            if isinstance(statement, ast.ClassDef):
                self._set_attributes(statement, known)
        return True

    def _set_attributes(self, statement: ast.ClassDef, known: dict[str, Any]) -> None:
        """The attributes of a class that were not as its text has them."""
        written = {
            ast.unparse(target): ast.unparse(node.value)
            for node in statement.body
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        for name, form in known.items():
            of, _, attribute = name.partition(".")
            if of == statement.name and attribute and written.get(attribute) != self._value(form):
                self._set_global(name, form)

    def _set_global(self, name: str, form: Any) -> None:
        """Before the code that reads it; but behind the statements that made it, if it is part of the module as well."""
        before, self.statements = self.statements, []
        new = f"{name} = {self._value(form)}"
        made = {one.partition(" = ")[0] for one in before}
        if made.isdisjoint(re.findall(r"\bv\d+\b", "\n".join([*self.statements, new]))):
            self.source += [*self.statements, new]
            self.statements = before
        else:
            self.statements = [*before, *self.statements, new]

    def _is_copied(self, statement: ast.ImportFrom, module: str) -> bool:
        source = self._absolute(statement, module).module or ""
        names = [alias.name for alias in statement.names]
        if source not in self.texts or any(alias.asname or alias.name == "*" for alias in statement.names):
            return False
        return all(f"{source}.{name}" not in self.texts and self._inline(source, name) for name in names)

    def _absolute(self, statement: Any, module: str) -> Any:
        if not isinstance(statement, ast.ImportFrom) or not statement.level:
            return statement
        parts = str(self.code[module]["package"]).split(".")
        base = parts[: len(parts) + 1 - statement.level]
        return ast.ImportFrom(".".join([*base, *([statement.module] if statement.module else [])]), statement.names, 0)

    def _class(self, form: dict[str, Any]) -> str:
        """A class, function or lambda that was defined in a function."""
        module, name = form["in"], form["name"].rpartition(".")[2]
        node = definition_of(form, self.texts.get(module, ""))
        if node is None:
            return "None"
        free = {key for key, _ in form["free"]}
        for used in sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - free):
            self._inline_if_there(module, used)
        for key, item in form["free"]:
            value = self._value(item)
            if value != key:
                self.source += [*self.statements, f"{key} = {value}"]
                self.statements = []
        if isinstance(node, ast.Lambda):
            return f"({ast.unparse(node)})"
        self.source.append(ast.unparse(node))
        return str(name)

    _function = _class

    def _inline_if_there(self, module: str, name: str) -> None:
        text = self.texts.get(module)
        if text is not None and needed(ast.parse(text), {name}):
            self._inline(module, name)


def _segment(text: str, statement: ast.stmt) -> str:
    """The text of a statement, with its decorators and comments."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(one.lineno for one in decorators)])
    return "\n".join(text.splitlines()[first - 1 : statement.end_lineno])
