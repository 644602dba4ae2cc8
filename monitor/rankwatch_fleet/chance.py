"""Whether a machine had more incidents than chance gives it. Pure.

If all machines were equally good, each of the N incidents would come to a machine with the probability p = its hours / all hours,
whatever came to the others. The number of its incidents would then be binomial, and it has at least k of them with

    P = P(X >= k) = sum over i from k to N of C(N, i) p^i (1 - p)^(N - i)

Of M machines that are looked at, some have many by chance alone. One stands out if M P < 0.05 (Bonferroni's bound): then at most
one of 20 archives of equally good machines names any of them. One incident alone never stands out.
"""

from __future__ import annotations

import math

LEVEL = 0.05

LEAST = 2
"""Incidents of a machine that stands out."""

FORMULA = (
    "A machine with k incidents stands out if M x P(X >= k) < 0.05, where X is binomial: N incidents, each with p = the "
    "machine's hours / all hours; M machines were looked at."
)


def tail(k: int, n: int, p: float) -> float:
    """P(X >= k) for a binomial X of ``n`` and ``p``."""
    if k <= 0:
        return 1.0
    if k > n or p <= 0.0:
        return 0.0
    if p >= 1.0:
        return 1.0
    odds = p / (1.0 - p)
    log_term = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
    ratios, ratio = 1.0, 1.0  # of the terms to the first one
    for i in range(k, n):
        ratio *= (n - i) / (i + 1) * odds
        ratios += ratio
        if math.isinf(ratios) or (i > n * p and ratio < 1e-17 * ratios):
            break
    return min(1.0, math.exp(min(0.0, log_term + math.log(ratios)))) if math.isfinite(ratios) else 1.0


def stands_out(k: int, n: int, p: float, machines: int) -> bool:
    return k >= LEAST and machines * tail(k, n, p) < LEVEL
