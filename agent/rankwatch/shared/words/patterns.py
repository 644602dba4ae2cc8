"""Shell patterns of modules and of their readings: which names they match, and what was meant where they match none. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache

from ..types.frame import REDUCED, SHARD, FrameSpec, Kind, ReadingSpec

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name by which DDP, torch.compile, FSDP and checkpointing hold a module. The names here are without."""

MOST_SAID = 4
"""Patterns that match nothing, of which something is said."""

MOST_LOOKS = 300_000
"""Comparisons of a pattern with a name, after which no more patterns are looked at: a training, or a collector, waits."""

MOST_NAMES = 2_000
"""Names among which what was meant is looked for."""

_DIGITS = "0123456789"
_WILD = re.compile(r"[*?\[]")


def names_of(spec: FrameSpec) -> list[str]:
    """The names that a pattern of modules may match."""
    return [spec.module, *spec.aliases]


def ignorable(spec: FrameSpec, row: ReadingSpec) -> list[str]:
    """The names by which ``ignore`` may match a reading: without the suffixes of its label, too."""
    labels = dict.fromkeys((row.label, row.label.partition(SHARD)[0], row.label.partition(REDUCED)[0]))
    modules = names_of(spec)
    names = [*modules, *(f"{module}:{one}" for module in modules for one in labels)]
    return names + [row.label] * (row.kind is Kind.LOSS)  # no module computes it


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(_compiled(pattern).match(name) for pattern in patterns)


@lru_cache(1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """``[1]`` is the letter 1 in a shell's pattern, and also itself: the label of a second output is ``output[1]``."""
    return re.compile(f"{translate(pattern)}|{translate(pattern.replace('[', '[[]'))}")


def unmatched(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """The patterns that match none of the names; as many of them as can be looked at in a moment."""
    return _missed(patterns, _Names(names))


def describe_unmatched(option: str, patterns: Sequence[str], names: Collection[str], what: str) -> list[str]:
    """A line for each pattern of an option that matches none of the names, with what may have been meant.

    Args:
        names: none of which anything is known: then nothing is said.
        what: what the names are, as in ``module of the model``.
    """
    known = _Names(names)
    missed = _missed(patterns, known) if names else []
    hints = [(one, _meant(one, known)) for one in missed[:MOST_SAID]]
    lines = [f"{option}: {one!r} matches no {what}" + (f"; did you mean {hint!r}?" if hint else "") for one, hint in hints]
    more = len(missed) - MOST_SAID
    return lines + [f"{option}: {more} more match no {what}"] * (more > 0)


def meant(pattern: str, names: Collection[str]) -> str:
    """A pattern that matches some of the names, and is like this one, which matches none; empty if there is none."""
    return _meant(pattern, _Names(names))


class _Names:
    """The names of a model's many blocks differ in their numbers alone. For a pattern without that number they are one.

    Attributes:
        looks: at names, so far.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.looks = 0
        self._names = names
        self._some: dict[str, list[str]] = {}

    def for_a(self, pattern: str) -> list[str]:
        """Some of the names: the pattern matches one of them if it matches any of all."""
        same = "".join(digit for digit in _DIGITS if digit not in pattern)
        if "[" in pattern and same != _DIGITS:  # [1-3] has the 2 as well
            same = ""
        if same not in self._some:
            table = str.maketrans(same, same[:1] * len(same))
            self._some[same] = list({name.translate(table): name for name in self._names}.values())
            self.looks += len(self._names)
        return self._some[same]

    def have(self, pattern: str, some: list[str]) -> bool:
        self.looks += len(some)
        return any(map(_compiled(pattern).match, some))


def _missed(patterns: Sequence[str], names: _Names) -> list[str]:
    missed = list[str]()
    for pattern in patterns:
        if not names.have(pattern, names.for_a(pattern)):
            missed.append(pattern)
        if names.looks > MOST_LOOKS:
            break
    return missed


def _meant(pattern: str, names: _Names) -> str:
    some = names.for_a(pattern)[:MOST_NAMES]
    return next((one for one in _alike(pattern, some) if names.have(one, some)), "")


def _alike(pattern: str, names: Collection[str]) -> Iterator[str]:
    """Patterns like this one, the likeliest first."""
    without = ".".join(part for part in pattern.split(".") if part not in WRAPPERS)
    no_regex = pattern.replace(".*", "*").replace("\\", "").strip("^$")
    spellings = [without, no_regex, *[f"{pattern}*"] * bool(pattern), *_respelt(pattern, names)]
    yield from spellings
    yield from (f"*.{one}" for one in [pattern, *spellings] if one)
    if len(pattern.strip("*.")) > 2:
        yield f"*{pattern.strip('*')}*"


def _respelt(pattern: str, names: Collection[str]) -> Iterator[str]:
    """The pattern with one part spelt as in a name, where it is nearly one."""
    known = sorted({part for name in names for part in re.split(r"[.:]", name) if part})
    parts = re.split(r"([.:])", pattern)
    for at, part in enumerate(parts):
        if part in ("", ".", ":") or _WILD.sub("", part) == "":
            continue
        bare = part.strip("*")
        for near in get_close_matches(bare, known, 3):
            yield "".join([*parts[:at], part.replace(bare, near), *parts[at + 1 :]])
