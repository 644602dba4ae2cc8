"""Finds versions and variables that differ between ranks. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping

from ...shared.words.text import name_spans
from ..result import CheckResult, fail, ok, warn

PREFIXES = ("RANKWATCH_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS")
UNSET = "not set"
VERSIONS = ("torch", "CUDA", "NCCL", "driver", "Python", "rankwatch")
MOST_VALUES = 8
"""Values of one name that a result lists."""


def environment_of(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be the same on all ranks. Keys do not leave the rank: a hash stands for them."""
    shared = {name: value for name, value in env.items() if name.startswith(PREFIXES)}
    connection = shared.get("RANKWATCH_CONNECTION", "")
    if connection.lstrip().startswith("{"):
        shared["RANKWATCH_CONNECTION"] = f"text with hash {hashlib.sha256(connection.encode()).hexdigest()[:8]}"
    return shared


def compare(check: str, facts: Mapping[int, Mapping[str, str]], *, is_fatal: bool, advice: str) -> list[CheckResult]:
    """One result for each name whose value differs between ranks; one `ok` where none does."""
    differs = fail if is_fatal else warn
    names = sorted({name for of_rank in facts.values() for name in of_rank})
    results = []
    for name in names:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, of_rank in sorted(facts.items()):
            ranks[of_rank.get(name, UNSET)].append(rank)
        if len(ranks) > 1:
            # The rarest value first: it is probably the wrong one.
            values = sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))
            found = "; ".join(f"{value} on {name_spans(of, most=None)}" for value, of in values[:MOST_VALUES])
            results.append(differs(check, f"{name}: {found}", advice))
    return results or [ok(check, f"{len(names)} compared, the same on all ranks" if len(facts) > 1 else "a single rank")]
