"""Which memory was measured in a batch: a tensor that several modules see is measured once."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from .tape import Cell


class MeasuredMemory:
    """A range of memory measured in this batch. Its cell is valid while its storage and its version counter are the same.

    The address alone is not enough: FSDP frees the memory of a storage that lives on, and another storage may get it.

    ``x.data.mul_()`` does not change the version counter: a tensor changed so between two modules has its old numbers in the
    second one. Therefore a frame that trips is measured anew.
    """

    __slots__ = ("_dtype", "_numel", "_storage", "_strides", "_version", "before", "cell")

    def __init__(self, values: Tensor, version: int, cell: Cell, before: Cell | None) -> None:
        self.cell = cell
        self.before = before
        """Its reading before it was changed in place."""
        self._storage = ref(values.untyped_storage())
        self._version = version
        self._numel = values.numel()
        self._dtype = values.dtype
        self._strides = None if values.is_contiguous() else (values.shape, values.stride())

    def is_in(self, storages: list[torch.UntypedStorage]) -> bool:
        held = self._storage()
        return any(held is storage for storage in storages)

    def is_of(self, values: Tensor, version: int) -> bool:
        return (
            self._version == version
            and self._numel == values.numel()
            and self._dtype == values.dtype
            and self._strides == (None if values.is_contiguous() else (values.shape, values.stride()))
            and self._storage() is values.untyped_storage()
        )
