"""Whether a gradient that an optimizer is about to use is not finite: one look at all of them, or none.

Where the training calls ``clip_grad_norm_``, the norm that it has computed says the same.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ..measure import norms
from ..measure.extremes import Unmeasurable, local
from ..measure.tape import Event, to_host, wait_for
from ..shared.frame import NO_NORM

log = logging.getLogger(__name__)

_looks: weakref.WeakSet[GradientLook] = weakref.WeakSet()


class Norms(NamedTuple):
    """Norms of gradients, on their way to the host. None: there are none of this layout or dtype.

    ``counted``: the first ones, whose squares add up to that of the norm of all gradients; 0: that norm is not known.
    """

    copies: list[tuple[Tensor, Event | None]] | None
    counted: int = 0

    def wait(self) -> None:
        for _, event in reversed(self.copies or ()):  # with the last one, the others have come
            wait_for(event)

    @property
    def are_finite(self) -> bool:
        """If so, their sum is, unless it overflows."""
        sums = [some if some.ndim == 0 else some.sum(dtype=torch.float64) for some, _ in self.copies or ()]
        return self.copies is not None and all([math.isfinite(one.item()) for one in sums])

    @property
    def square(self) -> float | None:
        """The square of the norm of all gradients; None: it is not known, or has not come."""
        counted = (self.copies or [])[: self.counted]
        if not all([event is None or event.query() for _, event in counted]):
            return None
        return math.fsum([some.double().square().sum().item() for some, _ in counted]) if counted else None


class StepNorm:
    """The norm of all gradients of one optimizer step, in which several optimizers may step."""

    def __init__(self) -> None:
        self._parts: list[Norms] = []

    def add(self, norms: Norms) -> None:
        self._parts.append(norms)

    def value(self) -> float:
        """NO_NORM: it is not known, or has not come from its device."""
        squares = [part.square for part in self._parts]
        known = [square for square in squares if square is not None]
        return math.sqrt(math.fsum(known)) if known and len(known) == len(squares) else NO_NORM


class _KnownNorm(NamedTuple):
    """A norm that the training has computed, and the gradients, with their versions once ``clip_grad_norm_`` is over.

    The versions of DTensors never change, so these gradients may have changed since.
    """

    gradients: list[Tensor]
    versions: list[int]
    norm: Tensor
    is_euclidean: bool

    @property
    def unchanged(self) -> set[int]:
        """The gradients that are as they were, except that ``clip_grad_norm_`` has multiplied them."""
        pairs = zip(self.gradients, self.versions, strict=True)
        return {id(gradient) for gradient, version in pairs if gradient._version <= version}


class GradientLook:
    """Looks at gradients, until ``remove``. ``guarded`` makes a function that catches its errors."""

    def __init__(self, guarded: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.took = guarded(self._take)
        """Called with a norm that the training has computed."""
        self._known: list[_KnownNorm] = []
        _wrap()
        _looks.add(self)

    def remove(self) -> None:
        self.forget()
        _looks.discard(self)

    def forget(self) -> None:
        """The gradients whose norm is known were used, or change."""
        self._known.clear()

    def _take(self, known: _KnownNorm) -> None:
        self._known.append(known)

    def norms_of(self, gradients: list[Tensor], *, looks: bool) -> Norms:
        """Begins to read the norms of gradients: those that the training knows, and the others.

        They tell whether the gradients are finite, unless ``looks`` is False: then the others are not read.
        """
        known, seen, sure = self._of_training()
        others = [gradient for gradient in gradients if id(gradient) not in seen] if seen else gradients
        unsure = [gradient for gradient in gradients if id(gradient) in seen and id(gradient) not in sure]
        found = [one.norm for one in known]
        try:
            if looks:
                found += _norms(others)
            is_known = all([one.is_euclidean for one in known]) and (looks or not others)
            counted = len(found) if is_known else 0
            if looks:
                found += _norms(unsure)
            return Norms([to_host(local(norm)) for norm in found], counted)
        except RuntimeError as error:
            log.debug("cannot take the norm of the gradients: %s", error)
            return Norms(None)

    def _of_training(self) -> tuple[list[_KnownNorm], set[int], set[int]]:
        """The norms that the training has computed, the gradients for which they stand, and those that are as they were."""
        seen, sure = set[int](), set[int]()
        found = []
        for known in self._known:
            unchanged = known.unchanged
            if not unchanged <= seen:
                seen |= unchanged
                found.append(known)
                sure |= unchanged if type(known.norm) is Tensor else set()
        return found, seen, sure


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    groups = [group["params"] for group in optimizer.param_groups]
    return [gradient for group in groups for parameter in group if (gradient := parameter.grad) is not None]


def is_bad(gradient: Tensor) -> bool:
    """Whether a gradient, or this rank's shard of it, is not finite; False if it cannot be read."""
    try:
        return not bool(torch.isfinite(local(gradient)).all())
    except (Unmeasurable, RuntimeError) as error:
        log.debug("cannot read a gradient: %s", error)
        return False


def are_all_bad(gradients: list[Tensor]) -> bool:
    """Whether each of several gradients is not finite, as far as this rank has a part of it."""
    try:
        here = [gradient for gradient in gradients if local(gradient).numel()]
    except (Unmeasurable, RuntimeError):
        return False
    return len(here) > 1 and all(map(is_bad, here))


def is_of_anomaly(error: BaseException) -> bool:
    """Whether the user's ``torch.autograd.detect_anomaly`` has raised an exception because of a nan in a backward."""
    return isinstance(error, RuntimeError) and "returned nan values in its" in str(error)


def have_come(gradients: list[Tensor]) -> bool:
    """Whether gradients can be read within a second: on a device, a collective may wait for a rank that has failed."""
    devices = {gradient.device for gradient in gradients if gradient.device.type == "cuda"}
    until = time.monotonic() + 1.0
    while not all([torch.cuda.current_stream(device).query() for device in devices]):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)  # torch has no wait for a stream that ends after a time
    return True


@torch.no_grad()
def _norms(gradients: list[Tensor]) -> list[Tensor]:
    if not gradients:
        return []
    values = [one if type(one) is Tensor and one.layout is torch.strided else local(one) for one in gradients]
    groups: Any = _group_tensors_by_device_and_dtype([values])  # type: ignore[list-item]
    return [
        torch.stack(norms.of(alike) if device.type == "cpu" else torch._foreach_norm(alike))
        for (device, _), ([alike], _) in groups.items()
        if device.type != "meta"
    ]


def _wrap() -> None:
    """Wraps the functions that compute the norm of the gradients. The wrappers stay; they cost next to nothing."""
    if hasattr(clip_grad, "_get_total_norm"):
        _observe(clip_grad, "_get_total_norm", clips=False)
    else:  # torch before 2.6
        _observe(clip_grad, "clip_grad_norm_", clips=True)
        torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_
    if fsdp := sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel"):
        _observe(fsdp.FullyShardedDataParallel, "clip_grad_norm_", clips=True)


def _observe(holder: Any, name: str, *, clips: bool) -> None:
    """``clips``: the function is given what has the gradients, and has multiplied them when it returns."""
    original = getattr(holder, name)
    if hasattr(original, "_rankwatch"):
        return
    order = list(inspect.signature(original).parameters).index("norm_type") - 1

    @functools.wraps(original)
    def total_norm(given: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not _looks:
            return original(given, *args, **kwargs)
        if isinstance(given, nn.Module):
            tensors = list[Tensor](given.parameters())
        else:
            given = tensors = [given] if isinstance(given, Tensor) else list(given)
        norm = original(given, *args, **kwargs)
        if isinstance(norm, Tensor):
            gradients = [tensor.grad for tensor in tensors if tensor.grad is not None] if clips else tensors
            norm_type = float(kwargs.get("norm_type", args[order] if len(args) > order else 2.0))
            last = [gradient._version + (0 if clips else 1) for gradient in gradients]
            for look in tuple(_looks):
                look.took(_KnownNorm(gradients, last, norm.detach(), norm_type == 2.0))
        return norm

    total_norm._rankwatch = True  # type: ignore[attr-defined]
    setattr(holder, name, total_norm)
