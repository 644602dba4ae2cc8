"""The norms of gradients that the training itself computes, for ``clip_grad_norm_`` mostly."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.weak import TensorWeakRef

from ...measure.extremes import local
from ...measure.tape import Copy, to_host
from ...touch.parts import parameters_in
from ...touch.patched import patch

_listeners: weakref.WeakSet[KnownNorms] = weakref.WeakSet()


class KnownNorm:
    """A norm, on its way to the host, and what it is the norm of.

    ``versions``: those of the gradients as they were, or as ``clip_grad_norm_`` has multiplied them. ``is_told``: it is the
    2-norm of gradients as they came. ``is_sure``: the versions tell whether a gradient changes. Those of DTensors never change.
    ``is_clipped``: its gradients were multiplied.
    """

    def __init__(self, norm: Tensor, gradients: dict[int, Tensor], *, is_told: bool, is_clipped: bool) -> None:
        values = local(norm)
        # A copy on the host too: the training may change the norm that it was given.
        self.copy: Copy = to_host(values) if values.is_cuda else (values.clone().cpu(), None)
        self._gradients = {number: TensorWeakRef(gradient) for number, gradient in gradients.items()}
        self.versions = {number: gradient._version for number, gradient in gradients.items()}
        self.is_told = is_told
        self.is_sure = type(norm) is Tensor
        self.is_clipped = is_clipped

    def unchanged(self) -> set[int]:
        """The gradients that are as they were, by ``id``."""
        there = self._there()
        return {number for number, version in self.versions.items() if number in there and there[number]._version == version}

    def renew(self, numbers: set[int]) -> None:
        """These gradients have been multiplied."""
        there = self._there()
        self.versions.update({number: there[number]._version for number in numbers if number in there})

    def _there(self) -> dict[int, Tensor]:
        return {number: gradient for number, ref in self._gradients.items() if (gradient := ref()) is not None}


class KnownNorms:
    """Hears of the norms, until ``remove``. ``guarded`` makes a function that catches its errors.

    ``present``: those whose gradients no optimizer has used. ``lost``: gradients (by ``id``) that were clipped, and whose norm
    was forgotten before an optimizer used them.
    """

    def __init__(self, guarded: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.present: list[KnownNorm] = []
        self.lost: set[int] = set()
        self.took, self.begins, self.ends = guarded(self._take), guarded(self._begin), guarded(self._end)
        self._unchanged: list[set[int]] = []
        _wrap()
        _listeners.add(self)

    def remove(self) -> None:
        self.present.clear()
        _listeners.discard(self)

    def forget(self) -> None:
        """The gradients change, or nobody waits for their norm any more."""
        self.lost.update(*[known.unchanged() for known in self.present if known.is_clipped])
        self.present.clear()

    def begin(self) -> None:
        """An optimizer has used the gradients, or they are all new."""
        self.present.clear()
        self.lost.clear()

    def _take(self, tensors: list[Tensor], norm: Any, norm_type: Any, are_parameters: bool) -> None:
        gradients = _gradients(tensors) if are_parameters else tensors
        have_versions = not any([gradient.is_inference() for gradient in gradients])
        if not (isinstance(norm, Tensor) and have_versions):
            return
        by_id = {id(gradient): gradient for gradient in gradients}
        standing = [(known, known.unchanged()) for known in self.present]
        self.present = [known for known, unchanged in standing if unchanged]  # those of another model may never be forgotten
        covered = set[int]().union(*[unchanged for _, unchanged in standing])
        if not by_id.keys() <= covered:  # else the gradients were clipped before: the first norm stands
            is_told = float(norm_type) == 2.0 and covered.isdisjoint(by_id)
            self.present.append(KnownNorm(norm, by_id, is_told=is_told, is_clipped=are_parameters))

    def _begin(self) -> None:
        """Gradients are about to be clipped."""
        self._unchanged = [known.unchanged() for known in self.present]

    def _end(self, parameters: list[Tensor]) -> None:
        """They are. Gradients that share memory share a version, too: it may have changed several times."""
        clipped = set(map(id, _gradients(parameters)))
        for known, numbers in zip(self.present, self._unchanged, strict=False):  # within, a norm may have been added
            known.renew(numbers)
            known.is_clipped |= not numbers.isdisjoint(clipped)


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def _wrap() -> None:
    """Wraps the functions that compute the norm of gradients, or clip them.

    What a script has imported before by name, of torch before 2.6 ``clip_grad_norm_``, is not wrapped.
    """
    if hasattr(clip_grad, "_get_total_norm"):
        patch(clip_grad, "_get_total_norm", partial(_observed, tells=True))
        patch(clip_grad, "_clip_grads_with_norm_", partial(_observed, clips=True))
        torch.nn.utils.get_total_norm = clip_grad._get_total_norm
        torch.nn.utils.clip_grads_with_norm_ = clip_grad._clip_grads_with_norm_
    else:  # torch before 2.6
        patch(clip_grad, "clip_grad_norm_", partial(_observed, tells=True, clips=True))
        torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_
    if fsdp := sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel"):
        patch(fsdp.FullyShardedDataParallel, "clip_grad_norm_", partial(_observed, tells=True, clips=True))


def _observed(original: Callable[..., Any], *, tells: bool = False, clips: bool = False) -> Callable[..., Any]:
    """``tells``: it returns the norm of what it is given. ``clips``: it multiplies the gradients of the parameters, or module."""
    order = list(inspect.signature(original).parameters).index("norm_type") - 1 if tells else 0

    def observed(given: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not _listeners:
            return original(given, *args, **kwargs)
        if isinstance(given, nn.Module):
            tensors = list[Tensor](parameters_in(given))
        else:
            given = tensors = [given] if isinstance(given, Tensor) else list(given)
        listeners = tuple(_listeners)
        if clips:
            for one in listeners:
                one.begins()
        norm = original(given, *args, **kwargs)
        norm_type = kwargs.get("norm_type", args[order] if len(args) > order else 2.0)
        for one in listeners:
            if clips:
                one.ends(tensors)
            if tells:
                one.took(tensors, norm, norm_type, clips)
        return norm

    return observed
