"""Finds parameters that were one tensor and are two now, with different values: each rank sees this alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..measure.modules import Modules, NamedModule, class_name
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
        while self._pending and self._pending[0][1].is_ready:
            self._say(*self._pending.pop(0), step, batch)
        if not self._apart or self._looks >= LOOKS:
            return
        self._looks += 1
        lanes = Lanes(2 * len(self._apart))
        lanes.write(
            (2 * number + side, one.own(), 0) for number, pair in enumerate(self._apart) for side, one in enumerate(pair)
        )
        lanes.send()
        self._pending.append((self._apart, lanes))
        if lanes.is_ready:
            self._say(*self._pending.pop(0), step, batch)

    def _say(self, pairs: list[_Pair], lanes: Lanes, step: int, batch: int) -> None:
        values = lanes.pairs()
        places = {_label(named, name): (named, name) for named in self._known for name in named.module._parameters}
        for number, pair in enumerate(pairs):
            name = pair.second.row.parameter
            if pair in self._apart and values[2 * number] != values[2 * number + 1] and name in places:
                self._apart = [one for one in self._apart if one is not pair]
                named, label = places[name]
                self._groups = [[other for other in group if other != name] for group in self._groups]
                kind, dtype = NoticeKind.UNTIED, pair.second.row.dtype
                about = named.names[0], class_name(named.module), label, dtype
                self._notify(Notice(kind, *about, batch, batch, float(step), 0.0))


def _label(named: NamedModule, name: str) -> str:
    return f"{named.names[0]}.{name}" if named.names[0] else name


def _alike(first: LaidParameter, second: LaidParameter) -> bool:
    """Whether the values of both on this rank can be compared."""
    one, other = first.own(), second.own()
    same = first.row[1:4] == second.row[1:4]
    return same and one is not None and other is not None and one.shape == other.shape and one.numel() > 0


def _shared(modules: Iterable[NamedModule]) -> list[list[str]]:
    names: defaultdict[int, list[str]] = defaultdict(list)
    for named in modules:
        for name, value in named.module._parameters.items():
            if value is not None:
                names[id(value)].append(_label(named, name))
    return [group for group in names.values() if len(group) > 1]


def _configured(root: Any, modules: Iterable[NamedModule]) -> list[list[str]]:
    """As models of Hugging Face say it: names, or names and what they are tied to."""
    keys = getattr(root, "_tied_weights_keys", None)
    if not keys or not getattr(getattr(root, "config", None), "tie_word_embeddings", False):
        return []
    found = {
        _label(named, name): value
        for named in modules
        for name, value in named.module._parameters.items()
        if value is not None
    }
    if isinstance(keys, dict):
        pairs = [(source, name) for name, source in keys.items()]
    else:
        embeddings = getattr(root, "get_input_embeddings", lambda: None)()
        source = getattr(embeddings, "weight", None)
        label = next((name for name, value in found.items() if value is source), "")
        pairs = [(label, name) for name in keys]
    return [
        [source, name]
        for source, name in pairs
        if source in found
        and name in found
        and found[source] is not found[name]
        and found[source].shape == found[name].shape
    ]
