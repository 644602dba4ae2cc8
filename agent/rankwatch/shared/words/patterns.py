"""Shell patterns of modules and of their readings: which names they match, and what was meant where they match none. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache
from itertools import islice

from ..types.frame import OF_MODULE, REDUCED, SHARD, FrameSpec, Kind, ReadingSpec

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name by which DDP, torch.compile, FSDP and checkpointing hold a module. The names here are without."""

MOST_SAID = 4
"""Patterns that match nothing, of which something is said."""

MOST_LOOKS = 300_000
"""Comparisons of a pattern with a name, after which no more patterns are looked at: a training, or a collector, waits."""

MOST_NAMES = 20_000
"""Names in which what was meant is looked for. They are of many blocks, and no more in their shapes than a few names."""

MOST_SHAPES = 2_000
"""Shapes of these names that are compared with a pattern."""

_NUMBER, _STAR, _NUMBER_OR_STAR = re.compile(r"[0-9]+"), re.compile(r"\*"), re.compile(r"[0-9]+|\*")


def names_of(spec: FrameSpec) -> list[str]:
    """The names that a pattern of modules may match."""
    return [spec.module, *spec.aliases]


def ignorable(spec: FrameSpec, row: ReadingSpec) -> list[str]:
    """The names by which ``ignore`` may match a reading: without the suffixes of its label, too."""
    labels = dict.fromkeys((row.label, row.label.partition(SHARD)[0], row.label.partition(REDUCED)[0]))
    modules = names_of(spec)
    names = [*modules, *(f"{module}:{one}" for module in modules for one in labels)]
    if row.kind is Kind.LOSS:  # no module computes it
        names += [row.label, row.label.partition(OF_MODULE)[0]]
    return names


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(_compiled(pattern).match(name) for pattern in patterns)


@lru_cache(1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """``[1]`` is the letter 1 in a shell's pattern, and also itself: the label of a second output is ``output[1]``."""
    return re.compile(f"{translate(pattern)}|{translate(pattern.replace('[', '[[]'))}")


def unmatched(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """The patterns that match none of the names; as many of them as can be looked at in a moment."""
    looked_at = patterns[: 1 + MOST_LOOKS // max(1, len(names))]
    return [pattern for pattern in looked_at if not _matches_any(pattern, names)]


def describe_unmatched(option: str, patterns: Sequence[str], names: Collection[str], what: str) -> list[str]:
    """A line for each pattern of an option that matches none of the names, with what may have been meant.

    Args:
        names: none of which anything is known: then nothing is said.
        what: what the names are, as in ``module of the model``.
    """
    missed = unmatched(patterns, names) if names else []
    hints = [(one, meant(one, names)) for one in missed[:MOST_SAID]]
    lines = [f"{option}: {one!r} matches no {what}" + (f"; did you mean {hint!r}?" if hint else "") for one, hint in hints]
    more = len(missed) - MOST_SAID
    return lines + [f"{option}: {more} more match no {what}"] * (more > 0)


def meant(pattern: str, names: Collection[str]) -> str:
    """A pattern that matches some of the names, and is like this one, which matches none; empty if there is none."""
    some = list(islice(names, MOST_NAMES))
    without = ".".join(part for part in pattern.split(".") if part not in WRAPPERS)
    for longer in (without, f"{without}*") if without else ():
        if _matches_any(longer, some):
            return longer
    known = dict.fromkeys(shape for name in some for shape in _shapes(name))
    near = next(iter(get_close_matches(_NUMBER.sub("*", without), islice(known, MOST_SHAPES), 1)), "")
    given = iter(_NUMBER_OR_STAR.findall(without))
    with_numbers = _STAR.sub(lambda star: next(given, "*"), near)
    return with_numbers if _matches_any(with_numbers, some) else ""


def _matches_any(pattern: str, names: Iterable[str]) -> bool:
    return any(map(_compiled(pattern).match, names))


def _shapes(name: str) -> Iterator[str]:
    """Patterns that match a name: all of it, its beginning and its end. The blocks of a model differ in their numbers alone."""
    shape = _NUMBER.sub("*", name)
    yield shape
    module, _, label = shape.partition(":")
    if label:
        yield f"*:{label}"
    elif "." in module:
        yield f"{module.partition('.')[0]}.*"
        yield f"*.{module.rpartition('.')[2]}"
