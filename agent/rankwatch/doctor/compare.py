"""What differs between ranks that should be alike. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping

from .finding import Finding, fail, ok, warn
from .words import name_ranks

PREFIXES = ("RANKWATCH_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS")
UNSET = "not set"
VERSIONS = ("torch", "CUDA", "NCCL", "driver", "Python", "rankwatch")


def environment_of(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be the same on all ranks; keys do not leave the rank."""
    kept = {name: value for name, value in env.items() if name.startswith(PREFIXES)}
    connection = kept.get("RANKWATCH_CONNECTION", "")
    if connection.lstrip().startswith("{"):
        kept["RANKWATCH_CONNECTION"] = f"text with hash {hashlib.sha256(connection.encode()).hexdigest()[:8]}"
    return kept


def compare(check: str, facts: Mapping[int, Mapping[str, str]], *, is_fatal: bool, advice: str) -> list[Finding]:
    """One finding for each name whose value is not the same on all ranks; else one that all is well."""
    say = fail if is_fatal else warn
    names = sorted({name for of_rank in facts.values() for name in of_rank})
    findings = []
    for name in names:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, of_rank in sorted(facts.items()):
            ranks[of_rank.get(name, UNSET)].append(rank)
        if len(ranks) > 1:
            # The few are what is to be looked at.
            told = sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))
            values = "; ".join(f"{value} on {name_ranks(of)}" for value, of in told[:8])
            findings.append(say(check, f"{name}: {values}", advice))
    return findings or [ok(check, f"{len(names)} compared, the same on all ranks" if len(facts) > 1 else "a single rank")]
