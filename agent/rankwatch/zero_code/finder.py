"""Finds the model to watch in a script that does not call ``watch``: the outermost modules that it trains.

A module that is called may be a part of a model whose own forward is never called: ``model.encode(x)`` calls the encoder.
Then the whole model is watched. A module in eval mode is trained if an optimizer has a parameter of it.

The finder wraps ``nn.Module.__call__``, but only up to the call of an outermost module: while that runs, torch is unchanged,
as torch.compile needs it. When the model begins its third batch, the finder stops, until another optimizer is made, or steps
that no watched model knows; only the watch's own hooks remain.

A process may train one model after another: folds, a grid of options. The watch of a model that others have followed gives its
place up, and its run has finished. Where all places are taken by models that train, nothing further is looked for.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import get_worker_info

from ..api.drop_in import remove_their_detector
from ..api.registry import OUTSIDE, is_left, leave, open_watches
from ..api.watch import watch
from ..api.watch_object import Watch
from ..errors import RankwatchError
from ..hook.stage import calling_stage
from ..measure.collectives import count_collectives
from ..measure.modules import named_modules, unwrap
from ..shared.types.config import Policy, is_disabled
from ..touch.parts import modules_in, parameters_in
from ..touch.patched import remove_our_frame
from ..touch.stack import outwards
from ..touch.torch_private import is_tracing, shard_of
from ..touch.whose_code import owner_of

if TYPE_CHECKING:
    from ..judge.lifecycle import Use

log = logging.getLogger(__name__)

LOOKED_AT = 3
"""Batches of the first model, after which all others, of a GAN say, were called as well."""

MAX_OUTSIDE = 16
"""Modules that train nothing whose outputs are looked at: the text encoders and the VAE of a diffusion model, say."""

MAX_MODELS = 4
"""Watched at a time. Further ones that train with these are not watched: the script calls each layer separately."""


FEW_STEPS = 128
"""A copy of a watched model that is trained for no more is for a trial: of learning rates, mostly, until the loss is inf."""


class Finder:
    """Looks for models to watch, until they are found."""

    def __init__(self) -> None:
        self._call: Callable[..., Any] = nn.Module.__call__
        self._hook = self._make_hook()
        self._is_looking = False
        self._is_inside = False
        self._first: weakref.WeakKeyDictionary[Watch, int] = weakref.WeakKeyDictionary()
        """Of the models that were found, the one whose batches count, and the batch in which it was then."""
        self._then: weakref.WeakKeyDictionary[Watch, dict[int, int]] = weakref.WeakKeyDictionary()
        """At which batch each watch was, by ``id``, when this one was made."""
        self._uses: list[Use] = []
        """Of all models that were found."""
        self._followed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that gave their place up. They get none again: clients that train in turn would end a run at each turn."""
        self._copies: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """The copies of watched models, with the steps of their optimizers."""
        self._is_crowded = False
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._have_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._outside: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()
        """What train nothing, with what takes the hooks off again."""

    def start(self) -> None:
        """Looks until the models are found, and again when an optimizer is made or is new: another training may begin."""
        count_collectives()
        self._look_again()
        self.after_steps = register_optimizer_step_post_hook(self._after_step)
        init = Optimizer.__init__

        @wraps(init)
        def hook(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._look_again()
            try:
                init(optimizer, *args, **kwargs)
                self._optimizers.add(optimizer)
            except BaseException as error:
                remove_our_frame(error)
                raise

        Optimizer.__init__ = hook  # type: ignore[assignment, method-assign]

    def _look_again(self) -> None:
        if self._is_looking:
            return
        self._first.clear()
        self._is_looking = True
        if nn.Module.__call__ is not self._call:  # the script has wrapped it; its wrapper stays
            self._call = nn.Module.__call__
            self._hook = self._make_hook()
        nn.Module.__call__ = self._hook  # type: ignore[method-assign]

    def stop(self) -> None:
        self._is_looking = False
        if nn.Module.__call__ is self._hook:
            nn.Module.__call__ = self._call  # type: ignore[method-assign]

    def _make_hook(self) -> Callable[..., Any]:
        call = self._call

        def hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._is_looking or self._is_inside or torch.compiler.is_compiling() or is_tracing():
                return call(module, *args, **kwargs)
            is_on_top = nn.Module.__call__ is self._hook  # else the script has wrapped it; its wrapper stays
            self._is_inside = True
            if is_on_top:
                nn.Module.__call__ = call  # type: ignore[method-assign]
            try:
                self._guarded(self._look_at, module)
                return call(module, *args, **kwargs)
            except BaseException as error:
                remove_our_frame(error)
                raise
            finally:
                self._is_inside = False
                if self._is_looking and is_on_top and nn.Module.__call__ is call:
                    nn.Module.__call__ = self._hook  # type: ignore[method-assign]

        return hook

    def _guarded(self, look: Callable[..., None], *args: Any) -> None:
        try:
            look(*args)
        except RankwatchError:
            self.stop()
            raise
        except Exception:
            self.stop()
            log.exception("rankwatch: an error of its own while it looked for the model to watch; nothing is watched")

    def _look_at(self, module: nn.Module) -> None:
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_traced or get_worker_info() is not None:
            return
        root = unwrap(module)
        if not torch.is_grad_enabled() or not any(map(_is_trainable, parameters_in(root))):
            self._look_outside(module, root)
        if not torch.is_grad_enabled() or is_left(root) or self._is_on_trial(root):
            return
        if not (module.training or _has_parameter_of(root, *self._optimizers)):
            return
        ours = list(open_watches())
        if not all(one.is_automatic for one in ours):
            self.stop()  # the script calls watch itself
            return
        if not self._first:  # a model that was found before may be trained again
            self._first.update({one: one.batch for one in ours if one.root is root})
        first = next(iter(self._first), None)
        if first is not None and _is_part(root, first.root):
            # The batch of a forward is counted when it begins, after this; that of a part has begun with another one.
            if first.batch - self._first[first] >= LOOKED_AT - (root is first.root):
                self.stop()
        elif any(map(_is_trainable, parameters_in(root))) and not any(_is_part(root, watch.root) for watch in ours):
            if root in self._followed:
                self._give_up()
                return
            if any(one.has_trained and _is_copy(root, one.root) for one in ours) and root not in self._copies:
                self._copies[root] = 0
                return
            if calling_stage(module) is None:
                whole = _whole(root)
                module, root = (module, root) if whole is root else (whole, whole)
            if is_left(root) or self._is_made_now(root):
                return
            self._close_parts(root)
            self._watch(module)

    def _look_outside(self, module: nn.Module, root: nn.Module) -> None:
        """A module that trains nothing may hand bad numbers to a model that does: what it returns is looked at."""
        is_ours = isinstance(module, torch.jit.ScriptModule) or module in self._outside or len(self._outside) >= MAX_OUTSIDE
        if is_ours or next(parameters_in(root), None) is None or _has_parameter_of(root, *self._optimizers):
            return
        if not any(_is_part(root, watch.root) for watch in open_watches()):
            self._outside[module] = OUTSIDE.watch(module, _name_in_script(root))

    def _close_parts(self, root: nn.Module) -> None:
        """Closes the watches of the root's parts: a script may call a layer to learn its shape before it makes the model."""
        for part in (one for one in open_watches() if _is_part(one.root, root)):
            part.give_way()
            self._first.clear()

    def _is_made_now(self, root: nn.Module) -> bool:
        """Whether a module calls one of its layers while it is made: to learn its shape, or to normalise its weights."""
        makers = (frame for frame in outwards(sys._getframe(1)) if frame.f_code.co_name == "__init__")
        is_made = any(issubclass(type(frame.f_locals.get("self")), nn.Module) for frame in makers)
        return is_made and not _has_parameter_of(root, *self._optimizers)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first step of an optimizer that no watched model knows: another training may have begun.

        A model that only a compiled function calls is found by its optimizer, one batch late: no call of it is seen.
        """
        for copy in [copy for copy in self._copies if _has_parameter_of(copy, optimizer)]:
            self._copies[copy] += 1
            if self._copies[copy] == FEW_STEPS:
                self._look_again()
        if optimizer in self._have_stepped:
            return
        self._have_stepped.add(optimizer)
        ours = list(open_watches())
        if not self._is_looking and ours and not any(_has_parameter_of(one.root, optimizer) for one in ours):
            self._look_again()
        if not self._is_looking or ours or "zero_grad" in vars(optimizer):  # it is the script's
            return
        zero_grad = optimizer.zero_grad

        # Not here: torch iterates over the hooks of optimizers, and a watch adds its own.
        def hook(*args: Any, **kwargs: Any) -> None:
            if vars(optimizer).get("zero_grad") is hook:  # if not, the script has stored or wrapped it
                del optimizer.zero_grad
            self._guarded(self._look_for_model_of, optimizer)
            zero_grad(*args, **kwargs)

        optimizer.zero_grad = hook  # type: ignore[method-assign]

    def _look_for_model_of(self, optimizer: Optimizer) -> None:
        if not self._is_looking or any(open_watches()):
            return
        for module in _outermost():
            if _has_parameter_of(module, optimizer) and not is_left(unwrap(module)):
                self._watch(module, first_batch=1)
        if any(open_watches()):
            self.stop()

    def _watch(self, module: nn.Module, first_batch: int = 0) -> None:
        root = unwrap(module)
        if isinstance(root, torch.jit.ScriptModule):
            log.warning("rankwatch: a scripted module takes no hooks and is not watched")
            leave(root)
            return
        if not self._make_room():
            self._give_up()
            return
        # With the Trainer's --debug underflow_overflow, ours replaces its detector, with the same policy.
        is_strict = remove_their_detector(root) and "RANKWATCH_POLICY" not in os.environ
        options: dict[str, Any] = {"policy": Policy.STRICT} if is_strict else {}
        options |= {"first_batch": first_batch} if first_batch else {}
        for part in [one for one in self._outside if _is_part(unwrap(one), root)]:
            self._outside.pop(part)()
        found = watch(calling_stage(module) or module, **options)
        if is_disabled():
            self.stop()
            return
        self._uses.append(found.be_automatic(lambda: any(use.has_trained for use in self._uses)))
        self._then[found] = {id(one): one.batch for one in open_watches()}
        if not self._first:
            self._first[found] = found.batch

    def _is_on_trial(self, root: nn.Module) -> bool:
        return self._copies.get(root, FEW_STEPS) < FEW_STEPS

    def _give_up(self) -> None:
        self.stop()
        if not self._is_crowded:
            log.warning("rankwatch: more than %d models train in this process; further ones are not watched", MAX_MODELS)
        self._is_crowded = True

    def _make_room(self) -> bool:
        """Whether there is a place for one more watch. If need be, one whose training others have followed gives its own up."""
        are_open = set(open_watches())
        ours = [one for one in self._then if one in are_open]  # the first one first, on all ranks alike
        if len(are_open) < MAX_MODELS:
            return True
        untrained = (one for one in ours if not (one.has_trained or _has_parameter_of(one.root, *self._optimizers)))
        followed = (one for one in ours if self._is_followed(one, ours))
        leaving = next(untrained, None) or next(followed, None)
        if leaving is None:
            return False
        if leaving.has_trained:
            self._followed.add(leaving.root)
        leaving.close()
        return True

    def _is_followed(self, one: Watch, ours: list[Watch]) -> bool:
        """Whether a model has had no batch since another one's training began."""
        batches = {other: self._then.get(other, {}) for other in ours}
        return any(
            then.get(id(one)) == one.batch and other.batch - then[id(other)] >= LOOKED_AT
            for other, then in batches.items()
            if other is not one and id(other) in then
        )


def _is_trainable(parameter: nn.Parameter) -> bool:
    """A parameter on the meta device has no values: its forward only learns shapes, or counts operations."""
    return parameter.requires_grad and not parameter.is_meta


def _is_copy(module: nn.Module, of: nn.Module) -> bool:
    """Whether a module has the class and the weights of another one, which is trained: nothing else makes weights alike."""
    if type(module) is not type(of):
        return False
    own, its = ([shard_of(one) for one in parameters_in(each)] for each in (module, of))
    return len(own) == len(its) and all(map(_are_equal, own, its))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.device, one.dtype) == (other.shape, other.device, other.dtype) and torch.equal(one, other)


def _is_part(module: nn.Module, of: nn.Module) -> bool:
    """Whether a module is a part of another one, or the same."""
    return any(part is module for part in modules_in(of)) or id(module) in named_modules(of)


def _has_parameter_of(module: nn.Module, *optimizers: Optimizer) -> bool:
    theirs = {id(parameter) for made in optimizers for group in made.param_groups for parameter in group["params"]}
    return any(id(parameter) in theirs for parameter in parameters_in(module))


def _outermost() -> list[nn.Module]:
    """The modules of this process that are in no other one. (``isinstance`` would wake up lazy imports.)"""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _name_in_script(module: nn.Module) -> str:
    """``vae.decoder``: what the code that calls a module calls it; else its class."""
    for frame in outwards(sys._getframe(1)):
        if owner_of(frame.f_code.co_filename) != "user":
            continue
        known = {**frame.f_globals, **frame.f_locals, **getattr(frame.f_locals.get("self"), "__dict__", {})}
        for name, value in known.items():
            if name != "self" and issubclass(type(value), nn.Module):
                inner = next((inner for inner, one in value.named_modules() if unwrap(one) is module), None)
                if inner is not None:
                    return f"{name}.{inner}" if inner else name
    return type(module).__name__


def _whole(part: nn.Module) -> nn.Module:
    """The outermost model that contains this module, without its wrappers.

    If several models share it, the one whose method is calling it; if none is, the module itself.
    """
    around = {id(unwrap(module)): unwrap(module) for module in _outermost() if _is_part(part, module)}
    found = [module for module in around.values() if module is not part and not isinstance(module, torch.jit.ScriptModule)]
    if len(found) == 1:
        return found[0]
    callers = {id(frame.f_locals.get("self")) for frame in outwards(sys._getframe())}
    return next((module for module in found if id(module) in callers), part)
