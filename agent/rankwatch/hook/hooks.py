"""Puts hooks on the modules of a model, also on modules added later, and removes them."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from itertools import chain, count
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..judge.events import Feed, RootsOver, StepDone, TuningCame, Wrapped
from ..measure.modules import NamedModule, named_modules, unwrap
from ..measure.recorder import Recorder
from ..rerun.careful import passed_again, running_again
from ..shared.words.patterns import matches
from ..touch.parts import modules_in
from ..touch.stack import outwards
from ..touch.torch_private import modes_on, never_compile, set_eval_frame, takes_fast_path
from ..touch.unseen import Hidden, hide, unseen
from .compiled import joined, traced
from .compiled.lean import Lean
from .compiled.scripting import hide_hooks
from .fails_open import FailsOpen

log = logging.getLogger(__name__)

RARELY = 16
"""Forwards between two looks at the modules, where only the root is measured."""


_all: weakref.WeakSet[Hooks] = weakref.WeakSet()
"""Those of all models that are watched: two may share a part."""


class ForwardHooks(Protocol):
    """What the hooks of modules call. Each catches the errors of its body, so that they do not stop the training.

    For the root: ``enter(named, args, kwargs)`` and ``leave_root(named, args, kwargs, output)``, with output None if its
    forward raised. For each other watched module: ``leave(named, args, kwargs, output)``. In a compiled model:
    ``handed(calls, numbers)`` instead (see ``traced``).
    """

    def is_running(self) -> bool:
        """Whether the root's forward runs in the calling thread."""

    enter: Callable[..., None]
    leave: Callable[..., None]
    leave_root: Callable[..., None]
    handed: Callable[..., None]


class StepHooks(Protocol):
    """What torch calls around the steps of all optimizers. Each catches the errors of its body."""

    before_step: Callable[..., Any]
    after_step: Callable[..., None]


class Hooks:
    """The modules of a model, and the hooks on the root, and on each module with a name that fits one of ``patterns`` (none:
    all modules).

    There are none before ``put_on``, and none in a copy or pickle of the model.

    Args:
        recorder: forgets modules that are no part of the model any more.
        feed: tells ``Wrapped``.
        doors: catch errors of ours.
    """

    events = (RootsOver, StepDone, TuningCame)

    def __init__(
        self, model: nn.Module, patterns: tuple[str, ...], recorder: Recorder, feed: Feed, doors: FailsOpen
    ) -> None:
        self.root = unwrap(model)
        self._patterns = patterns
        self._recorder = recorder
        self._feed = feed
        self._calls: ForwardHooks | None = None
        self._added = doors.guarded(self._on_module_added)
        self._numbers = count()
        self._children: list[int] = []
        """The modules right under those of the model, by ``id``, when they were last looked at."""
        self._graphs_before = joined.graphs
        self._known: dict[int, NamedModule] = {}
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._looks = 0
        self._watched_tables: list[tuple[dict[int, Any], int]] | None = None
        """The tables of hooks of the watched modules below the root, with the key of ours; None: to be looked at."""
        self._fast: dict[nn.TransformerEncoderLayer, list[tuple[dict[int, Any], int]]] = {}
        """The same tables, of the layers that torch runs as one operator where no module has a hook."""
        self._resting: list[tuple[Any, int, Any]] = []
        """The tables that a hook was taken from, with its key, and the hook."""
        self.lean = Lean()
        self._global: list[Callable[..., Any]] = []
        self._global_handles: list[RemovableHandle] = []
        self._abandon = weakref.finalize(self, _abandoned.extend, self._global_handles)
        self._abandon.atexit = False
        self.refresh()

    def put_on(self, forwards: ForwardHooks, steps: StepHooks) -> None:
        self._calls = forwards
        # torch keeps these three for the whole process: with strong references, the model would never be freed.
        self._global += [self._added, steps.before_step, steps.after_step]
        added, before, after = map(_weakly, self._global)
        self._global_handles += [
            register_module_module_registration_hook(added),
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]
        _remove(_abandoned)
        _all.add(self)
        _guard_hooks()
        _forget_compiled()
        hide_hooks()
        hide()
        for key, named in self._known.items():
            self._attach(key, named)

    def on(self, event: RootsOver | StepDone | TuningCame) -> None:
        match event:
            case RootsOver():
                self.wake()
            case StepDone():
                self.lean.stepped()
            case TuningCame(tuning):
                if tuning.modules is not None:
                    self._select(tuning.modules)

    def _select(self, patterns: tuple[str, ...]) -> None:
        """Watches the root, and the modules with a name that fits one of the patterns; without patterns, all."""
        self.wake()
        self._patterns = patterns
        for key, named in self._known.items():
            self._attach(key, named)
        if self.lean.has_graphs:
            _forget_compiled()

    def rest(self, *, wholly: bool) -> None:
        """Takes hooks off until ``wake``: those of a layer that torch runs in another way with them.

        ``wholly``: the forward has no work for any but the root's. torch calls modules without hooks faster.

        Not those beside the user's own, whose order would change. Those of a compiled model stay: its graphs run ``lean``.
        """
        self.wake()  # an interruption may have left some off
        if self.lean.has_graphs:
            self.lean.begin(wanted=wholly)
            return
        if self._watched_tables is None:
            self._look_at_tables()
        tables = self._watched_tables if wholly else []
        for layer, within in self._fast.items():
            if takes_fast_path(layer) and _count_hooks(layer) == len(within):
                tables = [*(tables or ()), *within]
        resting = self._resting
        for hooks, number in tables or ():
            if len(hooks) == 1 and number in hooks:
                resting.append((hooks, number, hooks[number]))  # first: an interruption may come at any line
                del hooks[number]
        if self._resting is not resting:  # another thread has called ``wake`` meanwhile
            for hooks, number, hook in resting:
                hooks.setdefault(number, hook)

    def _look_at_tables(self) -> None:
        tables = {
            key: (self._known[key].module._forward_hooks, handles[0].id)
            for key, handles in self._handles.items()
            if key != id(self.root)
        }
        layers = [named.module for named in self._known.values() if isinstance(named.module, nn.TransformerEncoderLayer)]
        self._fast = {
            layer: [tables[id(one)] for one in modules_in(layer) if id(one) in tables]
            for layer in layers
            if layer is not self.root
        }
        # Without its hook, torch's attention computes in another way.
        self._watched_tables = [
            table for key, table in tables.items() if not isinstance(self._known[key].module, nn.MultiheadAttention)
        ]

    def awake(self) -> list[NamedModule]:
        """The modules with hooks, once all are back, those of new modules too."""
        self.wake()
        self.refresh()
        return self.watched

    def wake(self) -> None:
        """Puts the hooks back. For any thread: an abort has come, say."""
        resting = self._resting
        for hooks, number, hook in resting:
            hooks[number] = hook
            if len(hooks) > 1:  # the user's was added meanwhile: later
                hooks.move_to_end(number, last=False)
        if self._resting is resting:  # last: an interruption may come at any line
            self._resting = []

    def refresh(self, *, rarely: bool = False) -> None:
        """The model may have changed, also in ways that torch does not tell: ``del``, or its table of modules was written to.

        ``rarely``: looks only once in so many calls.
        """
        self._looks += 1
        if rarely and self._looks % RARELY:
            return
        children = self._now()
        if self._known and children == self._children:
            return
        found = named_modules(self.root)
        for key, known in list(self._known.items()):
            if key not in found:
                self._forget(key)
            elif set(known.names) != set(found[key].names):
                self._rename(known, found[key].names)
        self._learn(found)
        self._children = self._now()

    def _now(self) -> list[int]:
        return [*map(id, chain.from_iterable([named.module._modules.values() for named in self._known.values()]))]

    @property
    def modules(self) -> list[NamedModule]:
        """All modules of the model."""
        return list(self._known.values())

    @property
    def watched(self) -> list[NamedModule]:
        """The modules with hooks."""
        return [named for key, named in self._known.items() if key in self._handles]

    def named(self, module: nn.Module) -> NamedModule | None:
        """The names of a module of the model; None if it is another model's."""
        return self._known.get(id(module))

    @property
    def own(self) -> list[NamedModule]:
        """The modules that no other watched model has; all, if there is no such module."""
        if len(_all) == 1:
            return self.modules
        found = [named for key, named in self._known.items() if not any(key in one._known for one in self.others)]
        return found if any(map(_has_parameters, found)) else self.modules

    @property
    def others(self) -> list[Hooks]:
        """Those of the other watched models."""
        return [hooks for hooks in _all if hooks is not self]

    def is_run_by_another(self, module: nn.Module) -> bool:
        """Whether another watched model, which has this module too and is no part of this one, runs in the calling thread."""
        others = [hooks for hooks in _all if id(hooks.root) not in self._known] if len(_all) > 1 else ()
        return any(id(module) in one._known and one._calls is not None and one._calls.is_running() for one in others)

    def running(self) -> NamedModule:
        """The module of the model whose forward is innermost on the caller's stack; the root if there is none."""
        for frame in outwards(sys._getframe(1)):
            module = frame.f_locals.get("self")
            named = self.named(module) if isinstance(module, nn.Module) else None
            if named is not None:
                return named
        return self._known[id(self.root)]

    def remove(self) -> None:
        self.wake()
        if self._abandon.detach() is not None:
            _remove(self._global_handles)
        if self.lean.has_graphs:
            _forget_compiled()
            self.lean.forget()
        for handles in self._handles.values():
            _remove(handles)
        self._handles.clear()
        _all.discard(self)
        for module in modules_in(self.root):
            _remove_moved(module)
        self._known.clear()

    @property
    def may_be_compiled(self) -> bool:
        """Whether a compiled graph may have hooks of ours. One that raises in its first run has handed nothing over."""
        return self.lean.has_graphs or joined.graphs > self._graphs_before

    def _handed(self, calls: traced.Calls, numbers: traced.Numbers) -> None:
        self.lean.handed()
        if self._calls is not None:
            self._calls.handed(calls, numbers)

    def _learn(self, modules: dict[int, NamedModule]) -> None:
        for key, named in modules.items():
            known = self._known.get(key)
            if known is not None:
                known.names += [name for name in named.names if name not in known.names]
            else:
                named.number = next(self._numbers)
                known = self._known[key] = named
                _remove_moved(named.module)
            self._attach(key, known)

    def _forget(self, key: int) -> None:
        """A module is no part of the model any more."""
        self.wake()
        self._watched_tables = None
        _remove(self._handles.pop(key, []))
        named = self._known.pop(key)
        self._recorder.release(named.number)
        named.module = _GONE

    def _rename(self, named: NamedModule, names: list[str]) -> None:
        self._recorder.release(named.number)
        named.number, named.names = next(self._numbers), list(names)

    def _let_go(self, replaced: nn.Module, child: nn.Module | None, path: str) -> None:
        """A child replaces another one: lets go at once what is certainly no part of the model. ``refresh`` sees the rest."""
        kept = set() if child is None else set(named_modules(child))
        for key in named_modules(replaced):
            known = self._known.get(key)
            if known is not None and key not in kept and all(f"{name}.".startswith(f"{path}.") for name in known.names):
                self._forget(key)

    def _is_selected(self, named: NamedModule) -> bool:
        return not self._patterns or any(matches(name, self._patterns) for name in named.names)

    def _attach(self, key: int, named: NamedModule) -> None:
        module, is_root = named.module, named.module is self.root
        if not is_root and not self._is_selected(named):
            self._watched_tables = None
            _remove(self._handles.pop(key, []))
        elif key not in self._handles and self._calls is not None:
            self._watched_tables = None
            lean = Lean() if is_root else self.lean  # the root is measured in each batch
            leave = _Leave(named, self._calls.leave_root if is_root else self._calls.leave, self._handed, lean)
            # Only the root's hook is called after a forward that raised: it closes the batch.
            handles = [module.register_forward_hook(leave, with_kwargs=True, always_call=is_root)]
            if is_root:
                enter = _Enter(named, self._calls.enter, self._handed, lean)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles[key] = handles

    def _on_module_added(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if name == "_orig_mod" and child is not None:
            self._feed.tell(Wrapped(parent, child))
        named = self._known.get(id(parent))
        if named is None:
            return
        paths = [f"{prefix}.{name}" if prefix else name for prefix in named.names]
        replaced = parent._modules.get(name)
        if replaced is not None and len(paths) == 1:
            self._let_go(replaced, child, paths[0])
        if child is not None:
            for path in paths:
                self._learn(named_modules(child, path))


class _Hook(Hidden):
    """A hook that knows its module's names."""

    def __init__(self, named: NamedModule, call: Callable[..., None], handed: Callable[..., None], lean: Lean) -> None:
        self.lean = lean
        self._named = named
        self._body = call
        self._receiver = traced.Receiver(named, handed)
        self.key: Tensor = self._receiver.key

    def _call(self, *rest: Any) -> None:
        # In a trace, our operations would become part of the graph.
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        # The hook may run between the graphs of a compiled model, and must not be compiled. This has the effect of
        # torch.compiler.disable, without its import of the whole compiler.
        before = set_eval_frame(None)
        try:
            if not modes_on():
                self._body(self._named, *rest)
            elif not self._is_passed_again(*rest):
                unseen(self._body, self._named, *rest)
        finally:
            set_eval_frame(before)

    def _is_passed_again(self, *rest: Any) -> bool:
        """Whether it is called in a forward that is run again after a trip."""
        return running_again() is not None


# Quantization moves hooks to the module that it puts in place of another one, and there calls them without kwargs.
class _Enter(_Hook):
    def __call__(self, module: nn.Module, *call: Any) -> None:
        if len(call) < 2:
            return
        if torch.compiler.is_dynamo_compiling():
            traced.enter(self.key, module.training, *call)
        else:
            self._call(*call)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, *call: Any) -> None:
        if len(call) < 3:
            return
        if torch.compiler.is_dynamo_compiling():
            if not self.lean.is_on:
                traced.leave(self.key, *call)
        else:
            self._call(*call)

    def _is_passed_again(self, *rest: Any) -> bool:
        return passed_again(self._named.module, rest)


for _call in (_Enter.__call__, _Leave.__call__, _Hook._call):
    never_compile(_call)


def _guard_hooks() -> None:
    """Makes compiled graphs depend on whether their modules had hooks.

    By default a graph also serves another model of the same class: a watched model would run the graph of an unwatched one,
    which measures nothing.
    """
    try:
        import torch._dynamo.config

        torch._dynamo.config.skip_nnmodule_hook_guards = False
    except Exception as error:  # noqa: BLE001  private, and of no use where nothing is compiled
        log.debug("cannot make compiled graphs depend on hooks: %s", error)


def _forget_compiled() -> None:
    """Lets dynamo compile anew the graphs from before a change of hooks, which it does not notice by itself."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _count_hooks(layer: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules_in(layer))


def _has_parameters(named: NamedModule) -> bool:
    return bool(named.module._parameters)


def _weakly(function: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.ref(function)

    def call(*args: Any) -> Any:
        held = reference()
        return held(*args) if held is not None else None

    return call


_GONE = nn.Module()
"""In place of a module that was replaced: frames that are not judged yet hold its names, and must not keep its weights."""


def _remove_moved(module: nn.Module) -> None:
    """Removes hooks of ours that were moved to a module from another one: only those are without kwargs."""
    for hooks, own in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook) and key not in own]:
            del hooks[key]


_abandoned: list[RemovableHandle] = []
"""Hooks of models that no longer exist. Not removed at once: a garbage collection may run while torch iterates over them."""


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
