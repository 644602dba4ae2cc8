"""A capsule -> ``repro.py``: a script that needs torch alone, and makes the inf or nan again."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .code import is_absent
from .definitions import needed
from .opened import OpenedCapsule
from .rebuild import is_function_at

_MODULE = '''\
def make(cls, parameters, buffers, modules, **state):
    """A module without a call of its constructor."""
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made._parameters.update(parameters), made._buffers.update(buffers), made._modules.update(modules)
    made.__dict__.update(state)
    return made
'''
_OBJECT = '''\
def new(cls, items=(), **state):
    """An object without a call of its constructor."""
    base = next((base for base in (OrderedDict, dict, list, tuple) if issubclass(cls, base)), object)
    made = base.__new__(cls, items) if base is tuple else base.__new__(cls)
    if base in (dict, OrderedDict):
        for key, value in dict(items).items():
            base.__setitem__(made, key, value)
    elif base is list:
        list.extend(made, items)
    for name, value in state.items():
        object.__setattr__(made, name, value)
    return made
'''
_LOAD = '''\
def load(file):
    """The tensors in a safetensors file."""
    body = Path(file).read_bytes()
    begin = 8 + int.from_bytes(body[:8], "little")
    dtypes = {{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
              "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
              "C64": torch.complex64, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn}}
    found = {{}}
    for name, row in json.loads(body[8:begin]).items():
        first, last = row["data_offsets"]
        data = bytearray(body[begin + first : begin + last])
        flat = torch.frombuffer(data, dtype=dtypes[row["dtype"]]) if data else torch.empty(0, dtype=dtypes[row["dtype"]])
        found[name] = flat.view(row["shape"])
    return found


tensors = load({file})
'''
_PARAMETER = """\
@functools.cache
def parameter(name, grad=True, **layout):
    return nn.Parameter(laid_out(name, **layout) if layout else tensors[name], grad)
"""
_LAYOUT = '''\
def laid_out(name, shape, stride, dtype):
    """With the strides that it had: some kernels compute in another order for others."""
    value = tensors[name].view(dtype)
    if value.dim() == 1 and value.numel() == 1 + sum((size - 1) * step for size, step in zip(shape, stride)):
        return value.as_strided(shape, stride)
    return torch.empty_strided(shape, stride, dtype=dtype).copy_(value.view(shape))
'''
_FIRST = '''\
class First(TorchDispatchMode):
    """Prints the first operator that made inf or nan of finite numbers."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [is_bad(leaf) for leaf in tree_leaves((args, kwargs))]
        result = func(*args, **kwargs or {})
        if not self.found and not any(given) and any(map(is_bad, tree_leaves(result))) and "empty" not in str(func):
            self.found = True
            print("first bad operator:", func)
        return result
'''
_IS_BAD = """\
def is_bad(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())
"""


_HELPERS = (_LAYOUT, _PARAMETER, _MODULE, _OBJECT)


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


class _Script:
    def __init__(
        self,
        path: Path,
        capsule: OpenedCapsule,
        texts: Mapping[str, str],
        rows: tuple[int, int, int] | None,
        draws: bool,
    ) -> None:
        self._path = path
        self._capsule = capsule
        self._code = capsule.manifest["code"]
        self._texts = texts
        self._rows = rows
        self._draws = draws
        self._imports: dict[str, None] = {}
        self._source: list[str] = []
        self._inlined: dict[str, str] = {}
        self._done: set[tuple[str, int]] = set()
        self._statements: list[str] = []
        self._names: dict[int, str] = {}
        self._needs_path = False
        self._is_input = False
        self._helpers = {_MODULE}
        self._json = json.dumps([capsule.manifest[key] for key in ("module", "args", "kwargs", "code")])

    def text(self) -> str:
        manifest, trip = self._capsule.manifest, self._capsule.trip
        module = self._value(manifest["module"])
        self._is_input = True
        args, kwargs = self._value(manifest["args"]), self._value(manifest["kwargs"])
        self._set_imported()
        around, end = self._around(), self._end()
        where = f"{manifest['name'] or '(root)'} ({manifest['class']})"
        head = (
            f'"""The forward of {where} that made {trip["state"]} on rank {manifest["rank"]}, in batch {trip["batch"]}.\n\n'
        )
        head += (
            f'Written by rankwatch replay, for torch {manifest["versions"]["torch"]}. Exit code 0: inf or nan again.\n"""\n'
        )
        is_beside = self._path.parent.resolve() == self._capsule.path.resolve()
        file = (
            'Path(__file__).parent / "tensors.safetensors"'
            if is_beside
            else repr(str((self._capsule.path / "tensors.safetensors").resolve()))
        )
        folders = [
            one for one in manifest["path"] if Path(one).is_dir() and not one.startswith((sys.prefix, sys.base_prefix))
        ]
        paths = [f"sys.path += {folders!r}", ""] if self._needs_path and folders else []
        parts = [
            head,
            "import json\nimport sys\nfrom pathlib import Path\n",
            "import torch\nfrom torch import nn\nfrom torch.utils._python_dispatch import TorchDispatchMode\n"
            "from torch.utils._pytree import tree_leaves\n",
            "\n".join([*paths, *sorted(self._imports)]) + "\n" if self._imports else "",
            "\n\n".join(["", _LOAD.format(file=file), *[one for one in _HELPERS if one in self._helpers], _IS_BAD, _FIRST]),
            "\n\n".join(["", "# --- the code of the training ---", *self._source, ""]) if self._source else "",
            "\n\n# --- the module and its inputs ---\n",
            "\n".join([*self._statements, f"module = {module}", f"args, kwargs = {args}, {kwargs}"]) + "\n",
            around,
            end,
        ]
        return "\n".join(part for part in parts if part)

    def _set_imported(self) -> None:
        """The globals of modules that are imported, of which the code is not here."""
        for module, about in self._code.items() if self._needs_path else ():
            if module != "__main__" and module not in self._inlined.values():
                known = [(name, form) for name, form in about["globals"] if not is_absent(form)]
                self._imports.update({f"import {module}": None} if known else {})
                self._statements += [f"{module}.{name} = {self._value(form)}" for name, form in known]

    def _around(self) -> str:
        """The flags that are not torch's defaults."""
        by = self._capsule.manifest["surroundings"]
        lines = []
        if by["default_dtype"] != "float32":
            lines.append(f"torch.set_default_dtype(torch.{by['default_dtype']})")
        if by["matmul_precision"] != "highest":
            lines.append(f"torch.set_float32_matmul_precision({by['matmul_precision']!r})")
        if by["deterministic"]:
            lines.append("torch.use_deterministic_algorithms(True, warn_only=True)")
        if by["flush_denormal"]:
            lines.append("torch.set_flush_denormal(True)")
        if self._draws:
            form = self._capsule.manifest["random"]["cpu"]
            lines.append(f"torch.set_rng_state(tensors[{form['tensor']!r}])")
        return "\n".join(["", *lines, ""]) if lines else ""

    def _end(self) -> str:
        by, label, inner = (self._capsule.manifest[key] for key in ("surroundings", "label", "inner"))
        modes = [f"torch.set_grad_enabled({by['grad']})"]
        modes += [
            f'torch.autocast("{device}", dtype=torch.{dtype})'
            for device, (is_on, dtype) in by["autocast"].items()
            if is_on and device == "cpu"
        ]
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
            return self._names.get(form["same"]) or self._value(self._capsule.forms[form["same"]])
        if is_absent(form):
            return "None"
        kind = form.get("is", "")
        if not kind:
            return self._plain(form)
        if form.get("id") in self._names:  # a global of the training that is also an attribute
            return self._names[form["id"]]
        text = getattr(self, f"_{kind.replace('nn.Module', 'module')}")(form)
        if "id" not in form:
            return str(text)
        name = f"v{form['id']}"
        if text == name:  # a module, which is a statement already
            return name
        self._names[form["id"]] = name
        if (
            kind in ("tuple", "list", "dict", "set", "frozenset", "method", "weakref")
            and len(text) < 100
            and not self._is_shared(form)
        ):
            self._names[form["id"]] = text
            return str(text)
        self._statements.append(f"{name} = {text}")
        return name

    def _is_shared(self, form: dict[str, Any]) -> bool:
        return f'"same": {form["id"]}}}' in self._json

    def _plain(self, form: dict[str, Any]) -> str:
        ((key, value), *rest) = form.items()
        if key == "float":
            return f"float({value!r})"
        if key == "torch":
            return f"torch.{value}"
        if key == "device":
            return f"torch.device({value!r})"
        if key == "size":
            return f"torch.Size({value!r})"
        if key == "enum":
            return f"{self._named(value)}[{rest[0][1]!r}]"
        if key == "complex":
            return f"complex({value[0]!r}, {value[1]!r})"
        if key == "bytes":
            return f"__import__('base64').b64decode({value!r})"
        if key in ("range", "slice"):
            return f"{key}({', '.join(map(repr, value))})"
        if key == "operator":
            return f"torch.ops.{value}"
        if key == "module":
            self._imports[f"import {value}"] = None
            return str(value)
        return self._named(value)

    def _tensor(self, form: dict[str, Any]) -> str:
        name, shape, cut = form["tensor"], form["shape"], ""
        if self._rows is not None and self._is_input and shape and shape[0] == self._rows[2]:
            cut = f"[{self._rows[0]}:{self._rows[1]}]"
        layout = self._layout(form)
        text = f"laid_out({name!r}, {layout})" if layout else f"tensors[{name!r}]"
        return f"{text}{cut}.requires_grad_()" if form["grad"] else f"{text}{cut}"

    def _layout(self, form: dict[str, Any]) -> str:
        """The layout of a tensor, if it is not that which was stored."""
        stored = self._capsule.tensors[form["tensor"]]
        shape, stride, dtype = form["shape"], form["stride"], f"torch.{form['dtype']}"
        if (list(stored.shape), list(stored.stride()), str(stored.dtype)) == (shape, stride, dtype):
            return ""
        self._helpers.add(_LAYOUT)
        return f"shape={tuple(shape)!r}, stride={tuple(stride)!r}, dtype={dtype}"

    def _parameter(self, form: dict[str, Any]) -> str:
        self._helpers.add(_PARAMETER)
        self._imports["import functools"] = None
        layout = self._layout(form)
        parts = [repr(form["tensor"]), *([] if form["grad"] else ["False"]), *([layout] if layout else [])]
        return f"parameter({', '.join(parts)})"

    def _items(self, form: dict[str, Any]) -> str:
        return ", ".join(map(self._value, form["items"]))

    def _list(self, form: dict[str, Any]) -> str:
        return f"[{self._items(form)}]"

    def _tuple(self, form: dict[str, Any]) -> str:
        return f"({self._items(form)}{',' if len(form['items']) == 1 else ''})"

    def _set(self, form: dict[str, Any]) -> str:
        return f"{{{self._items(form)}}}" if form["items"] else "set()"

    def _frozenset(self, form: dict[str, Any]) -> str:
        return f"frozenset([{self._items(form)}])"

    def _dict(self, form: dict[str, Any]) -> str:
        return self._pairs(form["items"])

    def _pairs(self, pairs: Iterable[Any]) -> str:
        return f"{{{', '.join(f'{self._value(key)}: {self._value(item)}' for key, item in pairs)}}}"

    def _method(self, form: dict[str, Any]) -> str:
        return f"{self._value(form['of'])}.{form['name']}"

    def _partial(self, form: dict[str, Any]) -> str:
        self._imports["import functools"] = None
        function, args, kwargs = map(self._value, form["parts"])
        return f"functools.partial({function}, *{args}, **{kwargs})"

    def _generator(self, form: dict[str, Any]) -> str:
        return f"torch.Generator({form['device']!r})"

    def _weakref(self, form: dict[str, Any]) -> str:
        self._imports["import weakref"] = None
        return f"weakref.ref({self._value(form['to'])})"

    def _array(self, form: dict[str, Any]) -> str:
        return f"{self._value(form['value'])}.numpy(){'[()]' if form['scalar'] else ''}"

    def _object(self, form: dict[str, Any]) -> str:
        self._helpers.add(_OBJECT)
        self._imports["from collections import OrderedDict"] = None
        parts = [self._value(form["class"])]
        if "factory" in form:
            parts[0] = "dict"  # an ordinary one does
        if "dict" in form:
            parts.append(self._pairs(form["dict"]))
        parts += [f"[{', '.join(map(self._value, form[name]))}]" for name in ("list", "tuple") if name in form]
        state = [f"{name}={self._value(item)}" for name, item in form["state"] if str(name).isidentifier()]
        return f"new({', '.join([*parts, *state])})"

    def _module(self, form: dict[str, Any]) -> str:
        """A module is a statement, so that its parts can be read one after the other."""
        groups = [self._pairs(form[group]) for group in ("parameters", "buffers", "modules")]
        state = [
            f"{name}={self._value(item)}"
            for name, item in form["state"]
            if not is_absent(item) and not (name == "_non_persistent_buffers_set" and not item.get("items"))
        ]
        parts = ", ".join([self._value(form["class"]), *groups, *state])
        name = self._names[form["id"]] = f"v{form['id']}"
        self._statements.append(f"{name} = make({parts})")
        for number, tensor in enumerate(form["parametrized"]):
            if not number:
                self._statements.append(f"torch.nn.utils.parametrize._inject_new_class({name})")
                self._imports["import torch.nn.utils.parametrize"] = None
            self._statements.append(f"torch.nn.utils.parametrize._inject_property({name}, {tensor!r})")
        for kind, hooks in form["hooks"]:
            for one in hooks:
                if not is_absent(one["hook"]):
                    register = kind.removeprefix("_").removesuffix("s")
                    hook = self._value(one["hook"])
                    self._statements.append(f"{name}.register_{register}({hook}, with_kwargs={one['with_kwargs']})")
        return name

    # --- code ---------------------------------------------------------------------------------------------------------

    def _named(self, name: str) -> str:
        module, _, path = name.partition(":")
        if module == "builtins":
            return path
        top = path.partition(".")[0]
        if self._inline(module, top):
            return path
        self._imports[f"import {module}"] = None
        self._needs_path |= module in self._code
        return f"{module}.{path}"

    def _inline(self, module: str, name: str) -> bool:
        """Copies a definition of the user's into the script, with all that it needs; returns whether it could."""
        text = self._texts.get(module)
        if text is None or self._inlined.get(name, module) != module:
            return False
        if name in self._inlined:
            return True
        self._inlined[name] = module
        tree = ast.parse(text)
        known = {key: form for key, form in self._code[module]["globals"] if not is_absent(form)}
        statements = needed(tree, {name}, set(known))
        for statement in statements:
            for one in ast.walk(statement):
                if isinstance(one, ast.Name) and one.id in known and (module, hash(one.id)) not in self._done:
                    self._done.add((module, hash(one.id)))
                    self._set_global(one.id, known[one.id])
        for statement in statements:
            if (module, statement.lineno) in self._done:
                continue
            self._done.add((module, statement.lineno))
            if isinstance(statement, ast.ImportFrom) and self._is_copied(statement, module):
                continue
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                if getattr(statement, "module", "") != "__future__":
                    absolute = self._absolute(statement, module)
                    self._imports[ast.unparse(absolute)] = None
                    roots = [getattr(absolute, "module", None) or alias.name for alias in absolute.names]
                    self._needs_path |= any(root in self._code for root in roots)
                continue
            self._source.append(_segment(text, statement))
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
        before, self._statements = self._statements, []
        new = f"{name} = {self._value(form)}"
        made = {one.partition(" = ")[0] for one in before}
        if made.isdisjoint(re.findall(r"\bv\d+\b", "\n".join([*self._statements, new]))):
            self._source += [*self._statements, new]
            self._statements = before
        else:
            self._statements = [*before, *self._statements, new]

    def _is_copied(self, statement: ast.ImportFrom, module: str) -> bool:
        source = self._absolute(statement, module).module or ""
        names = [alias.name for alias in statement.names]
        if source not in self._texts or any(alias.asname or alias.name == "*" for alias in statement.names):
            return False
        return all(f"{source}.{name}" not in self._texts and self._inline(source, name) for name in names)

    def _absolute(self, statement: Any, module: str) -> Any:
        if not isinstance(statement, ast.ImportFrom) or not statement.level:
            return statement
        parts = str(self._code[module]["package"]).split(".")
        base = parts[: len(parts) + 1 - statement.level]
        return ast.ImportFrom(".".join([*base, *([statement.module] if statement.module else [])]), statement.names, 0)

    def _function(self, form: dict[str, Any]) -> str:
        return self._local(form["in"], form["name"], form, self._found_function(form))

    def _class(self, form: dict[str, Any]) -> str:
        tree: Any = ast.parse(self._texts.get(form["in"], ""))
        for part in [part for part in form["name"].split(".") if part != "<locals>"]:
            tree = next((node for node in ast.walk(tree) if getattr(node, "name", "") == part and node is not tree), None)
        return self._local(form["in"], form["name"].rpartition(".")[2], form, tree)

    def _found_function(self, form: dict[str, Any]) -> Any:
        tree = ast.parse(self._texts.get(form["in"], ""))
        found = [node for node in ast.walk(tree) if is_function_at(node, form)]
        return found[-1] if found else None

    def _local(self, module: str, name: str, form: dict[str, Any], node: Any) -> str:
        if node is None:
            return "None"
        free = {key for key, _ in form["free"]}
        for used in sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - free):
            self._inline_if_there(module, used)
        for key, item in form["free"]:
            value = self._value(item)
            if value != key:
                self._source += [*self._statements, f"{key} = {value}"]
                self._statements = []
        if isinstance(node, ast.Lambda):
            return f"({ast.unparse(node)})"
        self._source.append(ast.unparse(node))
        return name

    def _inline_if_there(self, module: str, name: str) -> None:
        text = self._texts.get(module)
        if text is not None and needed(ast.parse(text), {name}):
            self._inline(module, name)


def _segment(text: str, statement: ast.stmt) -> str:
    """The text of a statement, with its decorators and comments."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(one.lineno for one in decorators)])
    return "\n".join(text.splitlines()[first - 1 : statement.end_lineno])
