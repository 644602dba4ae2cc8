"""Nested inputs and outputs -> leaves, their labels, and a hashable structure: equal structures have equal labels.

A container is a tuple, list, mapping, dataclass, or an object registered with ``torch.utils._pytree``. What raises when we walk
it is a leaf: its readings are lost, and nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

log = logging.getLogger(__name__)

K = TypeVar("K")

MAX_DEPTH = 16
MAX_LEAVES = 1024
"""Per value; further leaves are not measured. The first ones say enough, and a cycle must end."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, complex})


def inputs(args: Any, kwargs: Any, positional: K, keyword: K) -> list[tuple[K, str, Any]]:
    """The inputs of a call, each with its kind (as given) and label: ``input[0]``, ``input[attention_mask]``."""
    found = [(positional, f"input[{index}]", value) for index, value in enumerate(args)]
    return found + [(keyword, f"input[{name}]", value) for name, value in kwargs.items()]


def leaves(value: Any, label: str) -> list[tuple[str, Any]]:
    """The leaves of ``value`` with their paths: ``output[1][0]``, ``output[key]``, ``output.field``. At most MAX_LEAVES."""
    if isinstance(value, Tensor):  # what dynamo traces takes long to compile
        return [(label, value)]
    found: list[tuple[str, Any]] = []
    _label(value, label, found, 0)
    return found


def items(value: Any, label: str) -> list[tuple[str, Any]]:
    """The items of a container, or the value itself, each with its path."""
    parts = _parts(value)
    if parts is None:
        return [(label, value)]
    return [(f"{label}{suffix}", part) for suffix, part in zip(*parts, strict=True)]


def flatten(value: Any, found: list[Any]) -> Hashable:
    """Appends the leaves of ``value`` to ``found``, in the order of ``leaves``, and returns its structure.

    The structure includes the dtypes of tensors, and which numbers are not finite.
    """
    return _flatten(value, found, len(found) + MAX_LEAVES, 0)


def outputs_of(output: Any) -> list[Tensor]:
    """The outputs of a forward to which a backward hands a gradient, each once."""
    given = [output] if type(output) is Tensor else [value for _, value in leaves(output, "output")]
    found = {id(value): value for value in given if isinstance(value, Tensor) and value.grad_fn is not None}
    return list(found.values())


def _label(value: Any, label: str, found: list[tuple[str, Any]], depth: int) -> None:
    if len(found) >= MAX_LEAVES:
        return
    parts = _parts(value) if depth < MAX_DEPTH else None
    if parts is None:
        found.append((label, value))
        return
    for suffix, part in zip(parts[0], parts[1]):  # noqa: B905  dynamo traces this
        _label(part, f"{label}{suffix}", found, depth + 1)


def _flatten(value: Any, found: list[Any], limit: int, depth: int) -> Hashable:
    if isinstance(value, Tensor):
        if len(found) < limit:
            found.append(value)
        return value.dtype
    if type(value) in _PLAIN:
        if len(found) < limit:
            found.append(value)
        return type(value).__name__ if type(value) is not float or math.isfinite(value) else "not finite"
    if len(found) >= limit:
        return None
    if type(value) is tuple:  # the hot path: builds no suffixes
        if depth < MAX_DEPTH:
            return tuple([_flatten(part, found, limit, depth + 1) for part in value[:MAX_LEAVES]])
        found.append(value)
        return None
    parts = _parts(value) if depth < MAX_DEPTH else None
    if parts is None:
        found.append(value)
        return type(value).__name__
    return tuple(parts[0]), tuple([_flatten(part, found, limit, depth + 1) for part in parts[1]])


def _parts(value: Any) -> tuple[Sequence[str], Sequence[Any]] | None:
    """The label suffixes and the items of a container; None for a leaf."""
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return None
    try:
        return _items(value)
    except Exception as error:  # noqa: BLE001  it is the user's code
        log.debug("cannot walk a %s: %s", type(value).__name__, error)
        return None


def _items(value: Any) -> tuple[Sequence[str], Sequence[Any]] | None:
    """As ``_parts``. Empty lists and mappings are leaves, too.

    transformers' ModelOutput is both a mapping and a dataclass. The items of named tuples have numbers, as in the Hugging
    Face detector. A TensorDict is a mapping without a truth value, that iterates over its rows.
    """
    if isinstance(value, tuple) or (isinstance(value, list) and value):
        value = value[:MAX_LEAVES]
        return [f"[{index}]" for index in range(len(value))], value
    if isinstance(value, Mapping) and (keys := list(islice(value.keys(), MAX_LEAVES))):
        dotted = dataclasses.is_dataclass(value)
        return [f".{key}" if dotted else f"[{key}]" for key in keys], [value[key] for key in keys]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        names = [field.name for field in dataclasses.fields(value)]
        return [f".{name}" for name in names], [getattr(value, name, None) for name in names]
    if type(value) in pytree.SUPPORTED_NODES and not isinstance(value, (list, Mapping)):
        return _registered(value)
    return None


def _registered(value: Any) -> tuple[Sequence[str], Sequence[Any]] | None:
    node = pytree.SUPPORTED_NODES[type(value)]
    if node.flatten_with_keys_fn is not None:
        keyed, _ = node.flatten_with_keys_fn(value)
        return [_suffix(key) for key, _ in keyed], [part for _, part in keyed]
    parts, _ = node.flatten_fn(value)
    return [f"[{index}]" for index in range(len(parts))], list(parts)


def _suffix(key: Any) -> str:
    if isinstance(key, pytree.MappingKey):
        return f"[{key.key}]"
    return f".{key.name}" if isinstance(key, pytree.GetAttrKey) else pytree.keystr((key,))
