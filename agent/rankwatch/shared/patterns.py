"""Shell patterns of modules and of their readings: which names they match, and what was meant where they match none. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache

from .frame import REDUCED, SHARD, FrameSpec, Kind, ReadingSpec

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name by which DDP, torch.compile, FSDP and checkpointing hold a module. The names here are without."""

MOST_SAID = 4
"""Patterns that match nothing, of which something is said."""

MOST_LOOKS = 2_000_000
"""Comparisons of a pattern with a name, after which no more patterns are looked at."""

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
    looked_at = patterns[: max(1, MOST_LOOKS // max(1, len(names)))]
    return [one for one in looked_at if not any(map(_compiled(one).match, names))]


def describe_unmatched(option: str, patterns: Sequence[str], names: Collection[str], what: str) -> list[str]:
    """A line for each pattern of an option that matches none of the names, with what may have been meant.

    Args:
        names: none of which anything is known: then nothing is said.
        what: what the names are, as in ``module of the model``.
    """
    missed = unmatched(patterns, names) if names else []
    lines = [f"{option}: {one!r} matches no {what}{_hint(one, names)}" for one in missed[:MOST_SAID]]
    more = len(missed) - MOST_SAID
    return lines + [f"{option}: {more} more match no {what}"] * (more > 0)


def meant(pattern: str, names: Collection[str]) -> str:
    """A pattern that matches some of the names, and is like this one, which matches none; empty if there is none."""
    return next((one for one in _alike(pattern, names) if any(map(_compiled(one).match, names))), "")


def _hint(pattern: str, names: Collection[str]) -> str:
    found = meant(pattern, names)
    return f"; did you mean {found!r}?" if found else ""


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
