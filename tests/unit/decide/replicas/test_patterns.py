"""The rules that give what came apart its pattern: one finding for each rule, in the order of the rules."""

from __future__ import annotations

from rankwatch.shared.types.fingerprint import OF_BUFFERS
from rankwatch_monitor.decide.replicas.patterns import RULES, CameApart, Extent, Of, Since, pattern_of
from rankwatch_monitor.decide.replicas.votes import Split

FEW = Extent(most_never_equal=False, most_unseen=False, others_change=True, most_later=False)
PAIR = CameApart(9, Split((0, 1), 2, False), Since.LATER, True, "DDP", {"weight": 8})
THREE = PAIR._replace(split=Split((0, 1, 2), 3, False))
FIRST = THREE._replace(since=Since.FIRST_CHANGE)
ONE = PAIR._replace(split=Split((1,), 3, True))
INFERRED = PAIR._replace(is_declared=False)

FINDINGS = [
    (INFERRED._replace(source=OF_BUFFERS, since=Since.BEGINNING), FEW),
    (PAIR._replace(of=Of.INPUTS), FEW),
    (PAIR._replace(of=Of.GATHERED), FEW),
    (ONE, FEW._replace(most_never_equal=True)),
    (INFERRED._replace(since=Since.BEGINNING, trains_alone=True), FEW),
    (ONE._replace(since=Since.LOAD), FEW),
    (ONE._replace(since=Since.UNSEEN), FEW),
    (INFERRED._replace(trains_alone=True), FEW),
    (INFERRED._replace(since=Since.FIRST_CHANGE), FEW),
    (ONE, FEW),
    (FIRST, FEW._replace(most_unseen=True)),
    (FIRST, FEW),
    (FIRST, FEW._replace(others_change=False)),
    (PAIR, FEW),
    (THREE, FEW._replace(most_later=True)),
    (THREE, FEW),
]


def test_each_rule_decides_where_no_rule_above_it_holds() -> None:
    deciding = [next(number for number, rule in enumerate(RULES) if rule.when(*finding)) for finding in FINDINGS]
    assert deciding == list(range(len(RULES)))


def test_parameters_that_were_never_equal_are_of_a_load_unless_they_are_most() -> None:
    began = THREE._replace(since=Since.BEGINNING)
    assert [pattern_of(began, FEW._replace(most_never_equal=most)).value for most in (False, True)] == [
        "load",
        "initialisation",
    ]
