"""The norm of all gradients of an optimizer step, as they came: before ``clip_grad_norm_``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from ...measure.tape import Copy
from ...shared.types.frame import NO_NORM
from .known_norms import KnownNorm


class ReadNorms(NamedTuple):
    """The norms that were read of these gradients. ``are_whole``: each is that of all values of its gradients."""

    of: Sequence[Tensor]
    copies: Sequence[Copy]
    are_whole: bool


class StepNorm:
    """One step, in which several optimizers may step. Each gradient counts once; what cannot be told is not known."""

    def __init__(self) -> None:
        self._optimizers = WeakSet[Optimizer]()
        self._is_known = True
        self._copies: list[Copy] = []
        self._counted: set[int] = set()
        """The parameters of these optimizers, by ``id``. A gradient may be gone when the next optimizer steps."""
        self._awaited: dict[int, int] = {}
        """The versions of gradients for which a norm stands that was counted, and which no optimizer has used yet."""
        self._is_of_all_ranks = False
        """Whether a norm was counted that is of the shards of all ranks."""

    def has(self, optimizer: Optimizer) -> bool:
        return optimizer in self._optimizers

    def drop(self) -> None:
        """It cannot be known."""
        self._is_known = False
        self._copies.clear()
        self._awaited.clear()

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self._optimizers.add(optimizer)

    def add(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        known: list[KnownNorm],
        read: ReadNorms,
        *,
        lost: set[int],
    ) -> None:
        """It uses the gradients of these parameters.

        Args:
            known: the norms that stand for some of them.
            read: the norms of others.
            lost: gradients that were clipped, and whose norm is lost.
        """
        owners = list(map(id, parameters))
        if self._counted:
            gradients = [one for owner, one in zip(owners, gradients, strict=True) if owner not in self._counted]
        self._counted.update(owners)
        if not (self._is_known and gradients):
            return
        fresh = {id(gradient): gradient for gradient in gradients}
        for one in known:
            self._copies.append(one.copy)
            self._awaited |= one.versions
            self._is_of_all_ranks |= not one.is_sure
            self._is_known &= one.is_told
        rest = list(fresh.values())
        if self._awaited:
            rest = [one for number, one in fresh.items() if number not in self._awaited]
            versions = {number: self._awaited.pop(number) for number in fresh if number in self._awaited}
            self._is_known &= all([fresh[number]._version == version for number, version in versions.items()])
        if rest:
            self._copies += read.copies
            are_read = read.are_whole and list(map(id, read.of)) == list(map(id, rest))
            self._is_known &= are_read and not self._is_of_all_ranks and lost.isdisjoint(map(id, rest))
        if not self._is_known:
            self.drop()

    def value(self) -> float:
        """NO_NORM: it is not known, or has not come from its device."""
        if self._awaited or not self._copies or not all([event is None or event.query() for _, event in self._copies]):
            return NO_NORM
        return math.sqrt(math.fsum([norms.double().square().sum().item() for norms, _ in self._copies]))
