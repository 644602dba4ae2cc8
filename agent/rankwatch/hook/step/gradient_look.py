"""Whether a gradient that an optimizer is about to use is not finite: one look at all of them, or none.

Where the training calls ``clip_grad_norm_``, the norm that it has computed says the same.
"""

from __future__ import annotations

import logging
import math
import re
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ...measure import norms
from ...measure.extremes import Unmeasurable, local
from ...measure.tape import Copy, to_host, wait_for
from .known_norms import KnownNorms
from .step_norm import ReadNorms, StepNorm

log = logging.getLogger(__name__)


class Norms(NamedTuple):
    """Norms of gradients, on their way to the host. None: there are none of this layout or dtype."""

    copies: list[Copy] | None

    def wait(self) -> None:
        for _, event in reversed(self.copies or ()):  # with the last one, the others have come
            wait_for(event)

    @property
    def are_finite(self) -> bool:
        """If so, their sum is, unless it overflows."""
        sums = [some if some.ndim == 0 else some.sum(dtype=torch.float64) for some, _ in self.copies or ()]
        return self.copies is not None and all([math.isfinite(one.item()) for one in sums])


def norms_of(
    parameters: list[Tensor], gradients: list[Tensor], training: KnownNorms, step: StepNorm, *, looks: bool
) -> Norms:
    """Begins to read the norms of the gradients that an optimizer is about to use, those of ``parameters``, for its step.

    They tell whether the gradients are finite, unless ``looks`` is False: then only what the training knows is read.
    """
    numbers = set(map(id, gradients)) if training.present else set()
    seen, sure = set[int](), set[int]()
    standing = []
    for one in training.present:
        unchanged = one.unchanged()
        if not (unchanged <= seen or numbers.isdisjoint(one.versions)):
            seen |= unchanged
            sure |= unchanged if one.is_sure else set()
            standing.append(one)
    others = [gradient for gradient in gradients if id(gradient) not in seen] if seen else gradients
    unsure = [gradient for gradient in gradients if id(gradient) in seen and id(gradient) not in sure]
    try:
        read = [to_host(norms) for norms in _norms(others)] if looks else []
        again = [to_host(norms) for norms in _norms(unsure)] if looks else []
    except RuntimeError as error:
        log.debug("cannot take the norm of the gradients: %s", error)
        step.drop()
        return Norms(None)
    are_whole = looks and all([one.layout is torch.strided for one in others])
    step.add(parameters, gradients, standing, ReadNorms(others, read, are_whole), lost=training.lost)
    return Norms([*[one.copy for one in standing], *read, *again])


def graded(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters with a gradient, and their gradients. (To ask torch for a gradient costs most of this.)"""
    groups = [group["params"] for group in optimizer.param_groups]
    found = [(one, gradient) for group in groups for one in group if (gradient := one.grad) is not None]
    return [one for one, _ in found], [gradient for _, gradient in found]


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


def says_of_a_loss(error: BaseException) -> bool:
    """Whether the training ends itself because of a bad loss, as far as its last words tell: ``sys.exit(1)`` has none."""
    return isinstance(error, SystemExit) or _BAD_LOSS.search(str(error)) is not None


_BAD_LOSS = re.compile(r"\b(nan|inf|infinit[ey]|(non|not)[- ]?finite|loss)\b", re.IGNORECASE)


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
