"""Desynced parameters in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankwatch_monitor.decide.replicas.desync import Compared, Desync, DesyncPattern
from rankwatch_monitor.decide.replicas.desync_text import describe_compared, desync_lines

FLIPPED = Desync(120, "layers.3.weight", (1,), 4, DesyncPattern.ONE_RANK, "gpu07", "GPU-5f3a", equal_at=104, source="DDP")
OF_TWO = replace(FLIPPED, ranks=(0, 1), replicas=2, host="", gpu="")


def told(*found: Desync) -> list[str]:
    return list(desync_lines(found, 4).values())


def test_one_rank_of_many() -> None:
    later, head = replace(FLIPPED, step=121, parameter="layers.4.weight"), replace(FLIPPED, parameter="head.bias")
    assert told(FLIPPED, later, head) == [
        "rank 1 of 4 (gpu07, GPU-5f3a): layers.3.weight differs from the other 3 since step 120, equal at step 104; "
        "and 2 more parameters; one-rank: equal before, so suspect the memory, the optimizer's state, or code of that rank alone"
    ]


def test_of_two_replicas_nobody_knows_which_is_right() -> None:
    assert told(OF_TWO) == [
        "ranks 0-1: layers.3.weight differs between these ranks since step 120, equal at step 104, and which of them is right "
        "is not known; one-rank: equal before, so suspect the memory, the optimizer's state, or code of one of these ranks alone"
    ]


def test_groups_of_replicas_that_came_apart_alike_are_one_line() -> None:
    """As with HSDP 2x2: ranks 0 and 2 hold one shard, ranks 1 and 3 the other one."""
    apart = replace(OF_TWO, step=0, pattern=DesyncPattern.INITIALISATION, equal_at=-1)
    (line,) = told(replace(apart, ranks=(0, 2)), replace(apart, ranks=(1, 3)), replace(apart, parameter="b", ranks=(0, 2)))
    assert line.startswith("ranks 0-3: layers.3.weight differs between these ranks since step 0, ")
    assert "; and 1 more parameter; initialisation: " in line


def test_what_single_ranks_did_is_a_line_each_and_the_earliest_comes_first() -> None:
    later = replace(FLIPPED, step=300, ranks=(2,), host="", gpu="", origin=2)
    assert [line.partition(":")[0] for line in told(later, FLIPPED)] == ["rank 1 of 4 (gpu07, GPU-5f3a)", "rank 2 of 4"]


def test_what_is_only_inferred_says_so() -> None:
    router = replace(FLIPPED, pattern=DesyncPattern.SUBSET, is_declared=False, source="DDP ignores it")
    assert told(router)[0].endswith("; that they must be equal is inferred (DDP ignores it)")
    assert told(replace(router, source="none"))[0].endswith("; that they must be equal is inferred")
    assert "inferred" not in told(replace(router, pattern=DesyncPattern.NEVER_CHANGED))[0]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (DesyncPattern.SAME_INPUT, "layers.3.weight is the same on these ranks since step 120"),
        (DesyncPattern.NEVER_CHANGED, "has a gradient, and no optimizer step up to step 120 has changed it"),
        (DesyncPattern.UNTIED, "came untied: the values differ since step 120"),
        (DesyncPattern.GATHER, "as it was gathered at step 120, is not what the shards are"),
    ],
)
def test_other_patterns_have_words_of_their_own(pattern: DesyncPattern, words: str) -> None:
    assert words in told(replace(OF_TWO, pattern=pattern, equal_at=-1))[0]


@pytest.mark.parametrize("pattern", DesyncPattern)
def test_every_pattern_is_named_and_explained(pattern: DesyncPattern) -> None:
    assert f"; {pattern.value}: " in told(replace(FLIPPED, pattern=pattern))[0]


def test_what_was_compared() -> None:
    equal = "equal at step 82 (all 146 parameters, 4 ranks), compared 82 times"
    assert describe_compared(Compared(82, 146, 4, 82, True), 4) == equal
    assert describe_compared(Compared(0, 1, 2, 1, False), 2) == "not equal at step 0 (1 parameter, 2 ranks), compared 1 time"
    assert describe_compared(None, 2) == "not compared"
    assert describe_compared(None, 1) == ""
