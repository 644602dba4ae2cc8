"""Desynced parameters in words, and what was compared: for logs, reports and live views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankwatch.shared.words.text import name_spans

from .desync import BY_PRODUCTS, OF_SINGLE_RANKS, WORDS, Compared, Desync, DesyncPattern


def origins(found: Iterable[Desync]) -> dict[int, list[Desync]]:
    """The entries of each origin, the earliest first: one line tells them."""
    grouped: dict[int, list[Desync]] = {}
    for one in sorted(found, key=lambda one: one.step):
        grouped.setdefault(one.origin, []).append(one)
    return grouped


def describe_remedy(origin: Sequence[Desync]) -> str:
    """What to do, in one line."""
    return WORDS[origin[0].pattern].remedy


def desync_lines(found: Iterable[Desync], world_size: int) -> dict[int, str]:
    """One line for each origin, by its number."""
    return {key: describe_desync(origin, world_size) for key, origin in origins(found).items()}


def describe_desync(origin: Sequence[Desync], world_size: int) -> str:
    """One line for the entries of one origin: who, which parameter, since which step, how many more, and what it means."""
    first = origin[0]
    everyone = sorted({rank for one in origin for rank in one.ranks})
    names_ranks = first.pattern in OF_SINGLE_RANKS or first.pattern is DesyncPattern.UNKNOWN
    ranks = list(first.ranks) if names_ranks else everyone
    further = len({one.parameter for one in origin}) - 1
    whose = f", some of them on {name_spans(everyone)}" if ranks != everyone else ""
    more = f"; and {further} more parameter{'s' * (further != 1)}{whose}" if further else ""
    agree = first.replicas - len(ranks) if all(one.ranks == first.ranks for one in origin) else 0
    what = f"{_what(first, agree)}{more}"
    return f"{_who(first, ranks, world_size)}: {what}; {first.pattern.value}: {_meaning(first, ranks)}"


def describe_compared(compared: Compared | None, world_size: int) -> str:
    """``equal at step 82 (all 146 parameters, 4 ranks), compared 82 times``; empty for one rank alone."""
    if compared is None:
        return "not compared" if world_size > 1 else ""
    what = f"{compared.parameters} parameter{'s' * (compared.parameters != 1)}, {compared.ranks} ranks"
    often = f"compared {compared.times} time{'s' * (compared.times != 1)}"
    at = f"equal at step {compared.step}"
    return f"{at} (all {what}), {often}" if compared.equal else f"not {at} ({what}), {often}"


def _who(one: Desync, ranks: Sequence[int], world_size: int) -> str:
    where = ", ".join(part for part in (one.host, one.gpu) if part) if len(ranks) == 1 else ""
    named = name_spans(ranks) + (f" of {world_size}" if len(ranks) == 1 else "")
    return f"{named} ({where})" if where else named


def _what(one: Desync, others: int) -> str:
    """``others``: how many replicas agree with one another; 0: that is not known."""
    since = f"since step {one.step}"
    before = f", equal at step {one.equal_at}" if one.equal_at >= 0 else ""
    if one.pattern is DesyncPattern.SAME_INPUT:
        return f"{one.parameter} is the same on these ranks {since}"
    if one.pattern is DesyncPattern.NEVER_CHANGED:
        return f"{one.parameter} has a gradient, and no optimizer step up to step {one.step} has changed it"
    if one.pattern is DesyncPattern.UNTIED:
        return f"{one.parameter} came untied: the values differ {since}"
    if one.pattern is DesyncPattern.GATHER:
        return f"{one.parameter}, as it was gathered at step {one.step}, is not what the shards are{before}"
    if one.replicas == 2 == len(one.ranks):
        return f"{one.parameter} differs between these ranks {since}{before}, and which of them is right is not known"
    if others <= 0:
        return f"{one.parameter} differs between these ranks {since}{before}"
    return f"{one.parameter} differs from the other {others if others > 1 else 'one'} {since}{before}"


def _meaning(one: Desync, ranks: Sequence[int]) -> str:
    text = WORDS[one.pattern].means.format(one="that rank" if len(ranks) == 1 else "one of these ranks")
    if one.is_declared or one.pattern in BY_PRODUCTS:
        return text
    return f"{text}; that they must be equal is inferred" + (f" ({one.source})" if one.source not in ("", "none") else "")
