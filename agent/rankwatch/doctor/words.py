"""Ranks and figures in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0-3, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'' if len(spans) == 1 and spans[0][0] == spans[0][1] else 's'} {text}"


def describe_bandwidth(bytes_per_second: float) -> str:
    giga = bytes_per_second / 1e9
    return f"{giga:.2f} GB/s" if giga >= 0.1 else f"{1e3 * giga:.2f} MB/s"
