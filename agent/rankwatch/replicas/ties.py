"""Finds parameters that were one tensor and are two now, with different values: each rank sees this alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..measure.modules import Modules, NamedModule, class_name, parameters_of
from ..shared.types.notice import Notice, NoticeKind
from .lanes import Lanes
from .meshes import LaidParameter

LOOKS = 64
"""Looks at two parameters that came apart with equal values, before they are left alone."""


class _Pair(NamedTuple):
    first: LaidParameter
    second: LaidParameter


class Ties:
    """The names that stand for one parameter, as the watch began or as the model's configuration says."""

    def __init__(self, root: nn.Module, modules: Modules | None, notify: Callable[[Notice], None]) -> None:
        self._modules = modules
        self._notify = notify
        self._groups = [*_shared(self._known), *_configured(root, self._known)]
        self._apart: list[_Pair] = []
        self._looks = 0
        self._pending: list[tuple[list[_Pair], Lanes]] = []

    @property
    def _known(self) -> Sequence[NamedModule]:
        return self._modules.modules if self._modules is not None else ()

    @property
    def names(self) -> list[str]:
        """The names of parameters that may come untied."""
        return [name for group in self._groups for name in group]

    def begin(self, parameters: Iterable[LaidParameter]) -> None:
        """The model is as it is from now on: a tied parameter has one row, under one of its names."""
        rows = {one.row.parameter: one for one in parameters}
        self._looks = 0
        self._apart = []
        for group in self._groups:
            found = [rows[name] for name in group if name in rows]
            self._apart += [_Pair(found[0], one) for one in found[1:] if _alike(found[0], one)]

    def look(self, step: int, batch: int) -> None:
        """Looks at those that are two now, and says which of them have different values."""
        if self._apart and self._looks < LOOKS:
            self._looks += 1
            lanes = Lanes.of([one.own() for pair in self._apart for one in pair])
            lanes.send()
            self._pending.append((self._apart, lanes))
        while self._pending and self._pending[0][1].is_ready:
            self._say(*self._pending.pop(0), step, batch)

    def _say(self, pairs: list[_Pair], lanes: Lanes, step: int, batch: int) -> None:
        values = lanes.pairs()
        places = {label: (named, name) for label, named, name, _ in parameters_of(self._known)}
        for number, pair in enumerate(pairs):
            name = pair.second.row.parameter
            if pair in self._apart and values[2 * number] != values[2 * number + 1] and name in places:
                self._apart = [one for one in self._apart if one is not pair]
                named, label = places[name]
                self._groups = [[other for other in group if other != name] for group in self._groups]
                about = named.names[0], class_name(named.module), label, pair.second.row.dtype
                self._notify(Notice(NoticeKind.UNTIED, *about, batch, batch, float(step), 0.0))


def _alike(first: LaidParameter, second: LaidParameter) -> bool:
    """Whether the values of both on this rank can be compared."""
    one, other = first.own(), second.own()
    same = first.row[1:4] == second.row[1:4]
    return same and one is not None and other is not None and one.shape == other.shape and one.numel() > 0


def _shared(modules: Iterable[NamedModule]) -> list[list[str]]:
    names: defaultdict[int, list[str]] = defaultdict(list)
    for label, _, _, value in parameters_of(modules):
        names[id(value)].append(label)
    return [group for group in names.values() if len(group) > 1]


def _configured(root: Any, modules: Iterable[NamedModule]) -> list[list[str]]:
    """As models of Hugging Face say it: names, or names and what they are tied to."""
    keys = getattr(root, "_tied_weights_keys", None)
    if not keys or not getattr(getattr(root, "config", None), "tie_word_embeddings", False):
        return []
    found = {label: value for label, _, _, value in parameters_of(modules)}
    if isinstance(keys, dict):
        pairs = [(source, name) for name, source in keys.items()]
    else:
        embeddings = getattr(root, "get_input_embeddings", lambda: None)()
        source = getattr(embeddings, "weight", None)
        label = next((name for name, value in found.items() if value is source), "")
        pairs = [(label, name) for name in keys]
    there = [(source, name) for source, name in pairs if source in found and name in found]
    return [
        [source, name]
        for source, name in there
        if found[source] is not found[name] and found[source].shape == found[name].shape
    ]
