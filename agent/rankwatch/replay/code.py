"""The classes and functions that a capsule names -> the user's code.

Modules are imported from where the training imported them. The script itself is not run, because that would begin a training:
of it, only the definitions are executed that the module needs, with the imports and assignments on which they rest.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import linecache
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed

from ..errors import UsageError
from .definitions import needed, used_by

SCRIPT = "__rankwatch_script__"
"""The name under which the script's definitions run: its ``if __name__ == "__main__"`` is not true."""


class UsersCode:
    """Finds code for ``replay``.

    Args:
        code: what the manifest says of the user's modules; ``sources``: the texts of these modules in the capsule.
        path: ``sys.path`` of the training.
        stored: use the texts in the capsule where a module cannot be imported.
        replaced: the name of a module in the training -> the name under which it is imported here.
        rank: the number of this rank and how many there were, for code that asks for them as it is imported.
        copies: the texts of the user's modules that run in the place of their files, even if the files are here. What is not
            installed may be missing, as long as the module does not need it.
    """

    def __init__(
        self,
        code: Mapping[str, Mapping[str, Any]],
        sources: Mapping[str, str],
        path: list[str],
        *,
        stored: bool = False,
        replaced: Mapping[str, str] | None = None,
        rank: tuple[int, int] = (0, 1),
        copies: Mapping[str, str] | None = None,
    ) -> None:
        self._code = code
        self._sources = sources if copies is None else copies
        self._is_of_copies = copies is not None
        self._stored = stored or self._is_of_copies
        self._replaced = dict(replaced or {})
        self._rank = rank
        self._modules: dict[str, types.ModuleType] = {}
        """Those that were asked for, and the user's that these have imported."""
        self._wanted: set[str] = set()
        self._executed: set[int] = set()
        self._tree: ast.Module | None = None
        self._changed = {name for name, text in (copies or {}).items() if text != sources.get(name)}
        self._set: dict[tuple[str, str], tuple[Any, str, Any]] = {}
        self._build: Callable[[Any], Any] | None = None
        self.notes: list[str] = []
        """What is not as it was in the training."""
        sys.path += [folder for folder in path if folder not in sys.path and Path(folder).is_dir()]
        if self._stored:
            sys.meta_path.insert(0 if self._is_of_copies else len(sys.meta_path), self)

    def build_with(self, build: Callable[[Any], Any]) -> None:
        """Makes the globals that the training had set by ``build``, which makes a value of its form; those that are set, anew."""
        self._build = build
        for place, name, form in self._set.values():
            setattr(place, name, build(form))

    def find(self, name: str) -> Any:
        """The object of the name ``module:qualname``. Raises UsageError if it is not here."""
        module, _, path = name.partition(":")
        if module == "builtins":
            return getattr(builtins, path)
        place: Any = self.module(module, path.partition(".")[0])
        for part in path.split("."):
            try:
                place = getattr(place, part)
            except AttributeError:
                file = getattr(place, "__file__", None) or "it"
                raise UsageError(
                    f"{module} is here, but has no {path}: {file} is not the code of the training. "
                    f"--module {module}=NAME names another module, --module MODULE:CLASS the class itself"
                ) from None
        return place

    def module(self, name: str, wanted: str = "") -> types.ModuleType:
        """A module; of the script, with the definition of ``wanted``. Raises UsageError if it cannot be imported."""
        if name == "__main__" and self._here(name) == name:
            return self._script(wanted)
        if name not in self._modules:
            found = self._import(self._here(name), name)
            self._take_imported()
            self._modules.setdefault(name, found)
        return self._modules[name]

    def _take_imported(self) -> None:
        """Sets the globals of the user's modules that are imported now, also by one another."""
        for name in [name for name in self._code if name not in self._modules and name != "__main__"]:
            module = sys.modules.get(self._here(name))
            if module is None:
                continue
            self._modules[name] = module
            self._compare(name, getattr(module, "__file__", None))
            self._set_globals(name, module, sorted(self._globals(name), key=lambda key: "." in key))

    def _here(self, name: str) -> str:
        """The name here of a module of the training; that of its package may have changed."""
        for old, new in self._replaced.items():
            if name == old or name.startswith(f"{old}."):
                return new + name[len(old) :]
        return name

    def text_of(self, name: str) -> str:
        """The source text of a user's module: the one that is imported here, else the one in the capsule."""
        file = self.file_of(name)
        if name in self._modules and Path(file).is_file():
            return Path(file).read_text(encoding="utf-8")
        return self._sources.get(name, "")

    @property
    def texts(self) -> dict[str, str]:
        """The source texts of the user's modules that have run."""
        return {name: self.text_of(name) for name in self._modules if name in self._sources}

    def file_of(self, name: str) -> str:
        return str(getattr(self._modules.get(name), "__file__", None) or self._code.get(name, {}).get("file", ""))

    def tell(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _import(self, here: str, there: str) -> types.ModuleType:
        try:
            with _as_rank(*self._rank):
                return importlib.import_module(here)
        except Exception as error:  # noqa: BLE001  the user's code
            text = str(error) if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}"
            file = self._code.get(there, {}).get("file", "")
            trained = f" ({file} in the training)" if file else ""
            missing = getattr(error, "name", None) or ""
            if isinstance(error, ModuleNotFoundError) and f"{here}.".startswith(f"{missing}."):
                advice = "Start replay where it can be imported, or set PYTHONPATH"
                advice += f"; --module {there}=NAME names it otherwise" if there in self._code else ""
            else:
                advice = "Its own code raises this as it is imported: install what it needs, or mend it"
            stored = ", or --stored-code runs the copy in the capsule" if there in self._sources and not self._stored else ""
            raise UsageError(f"cannot import {here}{trained}: {text.rstrip('.')}. {advice}{stored}") from None

    def _compare(self, name: str, file: str | None) -> None:
        text = self._sources.get(name)
        if text is None or file is None or not Path(file).is_file():
            return
        if Path(file).read_text(encoding="utf-8", errors="replace") != text:
            self._changed.add(name)
            self.tell(f"{Path(file).name} has changed since the training: the code that is here now is run")

    def _globals(self, name: str) -> dict[str, Any]:
        """The globals as the training had set them, unless the code has changed since."""
        about = self._code.get(name, {"globals": []})
        return {} if name in self._changed else {key: form for key, form in about["globals"] if not is_absent(form)}

    def _set_globals(self, name: str, module: types.ModuleType, keys: Iterable[str]) -> None:
        """Sets these globals, and these attributes of classes, whose keys have the name of the class before a dot."""
        forms = self._globals(name)
        for key in keys:
            if key not in forms or (name, key) in self._set or self._build is None:
                continue
            *path, last = key.split(".")
            place: Any = module
            for part in path:
                place = getattr(place, part, None)
            if place is not None:
                self._set[name, key] = place, last, forms[key]
                setattr(place, last, self._build(forms[key]))

    # --- the script ---------------------------------------------------------------------------------------------------

    def _script(self, wanted: str) -> types.ModuleType:
        """The module of the script's definitions, with that of ``wanted`` and what it needs."""
        if "__main__" not in self._modules:
            self._modules["__main__"] = self._prepare_script()
        module = self._modules["__main__"]
        if wanted and wanted not in self._wanted and self._tree is not None:
            self._wanted.add(wanted)
            known = self._globals("__main__").keys()
            self._set_globals("__main__", module, [wanted])
            for statement in needed(self._tree, {wanted}, known):
                if id(statement) not in self._executed:
                    self._executed.add(id(statement))
                    self._set_globals("__main__", module, used_by(statement))
                    self._run(statement, module)
                    of_class = f"{getattr(statement, 'name', '')}."
                    self._set_globals("__main__", module, [key for key in known if key.startswith(of_class)])
        return module

    def _prepare_script(self) -> types.ModuleType:
        about = self._code.get("__main__")
        if about is None:
            raise UsageError(
                "the module was defined in a session without a file, whose text is not in the capsule: put its class into a "
                "file, and name it with --module MODULE:CLASS"
            )
        file, text = Path(about["file"]), self._sources["__main__"]
        is_here = bool(about["file"]) and file.is_file() and not self._is_of_copies
        if is_here:
            self._compare("__main__", str(file))
            text = file.read_text(encoding="utf-8")
        elif not self._stored and not about["file"]:
            raise UsageError(
                "the module was defined in a notebook: --stored-code runs the copy of its cells in the capsule, or name its "
                "class with --module MODULE:CLASS"
            )
        elif not self._stored:
            raise UsageError(
                f"the script {file} is not here: start replay where it is, name its class with --module MODULE:CLASS, or let "
                "--stored-code run the copy in the capsule"
            )
        module = types.ModuleType(SCRIPT)
        module.__file__ = str(file) if about["file"] else "<session>"
        module.__package__ = about["package"] or None
        sys.modules[SCRIPT] = module  # dataclasses look up their module
        if not is_here:
            linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
        self._tree = ast.parse(text, module.__file__)
        return module

    def _run(self, statement: ast.stmt, module: types.ModuleType) -> None:
        body = ast.Module([statement], [])
        try:
            with _as_rank(*self._rank):
                exec(compile(body, module.__file__ or "", "exec"), module.__dict__)
        except Exception as error:  # noqa: BLE001  the user's code
            why = f"{type(error).__name__}: {error}".rstrip(".")
            raise UsageError(
                f"{module.__file__}:{statement.lineno} cannot be executed here, and the module needs it: {why}. "
                "--module MODULE:CLASS names a class that can be imported"
            ) from None
        self._take_imported()

    # --- the copies, which Python imports from here ------------------------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        stored = self._stored_as(name)
        if stored is None:
            return None
        found: Any = importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]
        about = self._code[stored]
        if about["is_package"]:  # it may have modules that are not in the capsule, such as compiled ones
            found.submodule_search_locations = [str(Path(about["file"]).parent)]
        return found

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Executes the text of a module in the capsule."""
        name = self._stored_as(module.__name__) or ""
        text, file = self._sources[name], f"capsule:{name}.py"
        module.__file__ = file
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        if not self._is_of_copies:
            exec(compile(text, file, "exec"), module.__dict__)
            self.tell(f"{name} is the copy in the capsule")
            return
        for statement in ast.parse(text).body:
            try:
                exec(compile(ast.Module([statement], []), file, "exec"), module.__dict__)
            except Exception as error:  # noqa: BLE001  whoever needs what this defines fails then
                sys.stderr.write(f"passed over {name}.py:{statement.lineno}: {type(error).__name__}: {error}\n")

    def _stored_as(self, name: str) -> str | None:
        """The name in the capsule of a module that is imported as ``name`` here."""
        return next((one for one in self._sources if self._here(one) == name and one != "__main__"), None)


@contextlib.contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """torch says that this process is this rank of so many, although it is in no process group."""
    answers = {"get_rank": lambda group=None: rank, "get_world_size": lambda group=None: world_size}
    places = [torch.distributed, torch.distributed.distributed_c10d] if torch.distributed.is_available() else []
    with contextlib.ExitStack() as stack:
        for place in places:
            for name, answer in answers.items():
                stack.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, answer)
        yield


def is_absent(form: Any) -> bool:
    """Whether a value is not in the capsule."""
    return isinstance(form, dict) and "absent" in form
