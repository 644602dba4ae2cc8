"""The counts of collectives: equal for equal calls, bounded, and of groups that are there."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from rankwatch.measure.ledger import KEPT, CallLedger, DistinctCall, GroupCalls, Signature, Teller
from rankwatch.shared.types.calls import LAST_WORDS, MAX_CALLS, MAX_PARTING, MAX_TOLD
from rankwatch.shared.types.messages import Recount
from rankwatch.touch.torch_private import GroupFacts


class Group:
    """A process group."""


def facts(name: str = "0", *ranks: int, two: bool = False) -> GroupFacts:
    return GroupFacts(name, "", ranks or (0, 1), name == "0", two)


def call(number: int = 0) -> DistinctCall:
    return DistinctCall(Signature("all_reduce", number, "float32", "sum"), None, 0)


CALLS = [call(number) for number in range(3)]
sequences = st.lists(st.integers(0, 2), max_size=30)


def of(numbers: list[int], counted_after: int = -1) -> GroupCalls:
    """``counted_after``: after how many calls the count is asked for, too."""
    calls = GroupCalls(1, "the default group", 2)
    for place, number in enumerate(numbers):
        if place == counted_after:
            calls.count()
        calls.add(CALLS[number])
    return calls


@given(sequences, sequences, st.integers(0, 30))
def test_counts_are_equal_if_the_calls_are(one: list[int], other: list[int], at: int) -> None:
    assert (of(one).count() == of(other, at).count()) == (one == other)
    assert of(one, at).count() == of(one).count()


@given(st.integers(0, 3 * KEPT), st.integers(1, 3 * KEPT))
def test_what_is_told_of_calls_is_bounded(count: int, first: int) -> None:
    calls = of([number % 3 for number in range(count)])
    begins, total, told = calls.since(first)
    assert (total, len(told) <= MAX_CALLS) == (count, True)
    assert begins == max(first, count - KEPT + 1)
    assert told == [CALLS[(begins + place - 1) % 3] for place in range(len(told))]
    assert len(told) == max(0, min(MAX_CALLS, count - begins + 1))
    assert len(calls.new) < KEPT


def test_a_call_is_told_with_what_must_be_alike_and_its_line() -> None:
    told = DistinctCall(Signature("reduce", 8, "float32", "max", 3), call.__code__, 7).describe()
    assert told.what == "reduce of 8 float32 (max) to rank 3"
    assert told.site.endswith("test_ledger.py:7 in call")
    parts = [Signature(*different) for different in (("reduce", 8), ("reduce", 9), ("broadcast", 8), ("reduce", 8, "int64"))]
    assert len({DistinctCall(signature, None, 0).number for signature in parts}) == 4
    assert DistinctCall(parts[0], call.__code__, 1).number == DistinctCall(parts[0], None, 2, "another name").number


def test_groups_are_told_apart_and_forgotten_with_their_end() -> None:
    ledger, groups = CallLedger(), [Group() for _ in range(4)]
    keys = []
    for group, known in zip(groups, (facts(), facts("1"), facts("1", 2, 3), facts()), strict=True):
        met = ledger.meet(group, known)
        assert met.calls is not None
        keys.append(met.calls.key)
    assert len(set(keys)) == 4, "a default group that is made again is another one"
    other = CallLedger()
    assert [key for group in groups[:1] if (found := other.meet(group, facts()).calls) for key in [found.key]] == keys[:1]
    del group, groups, met
    gc.collect()
    assert (list(ledger.groups()), ledger.known) == ([], {})


def test_a_group_of_which_calls_were_missed_is_compared_only_with_members_that_missed_as_many() -> None:
    group = Group()
    keys = {met.key for before in (0, 1, 2) if (met := CallLedger().meet(group, facts(), before).calls) is not None}
    assert len(keys) == 3


def test_what_has_an_order_of_its_own_on_the_host_has_its_own_count() -> None:
    ledger, group = CallLedger(), Group()
    met = ledger.meet(group, facts(two=True))
    assert met.calls is not None
    assert met.on_host is not None
    assert met.calls.key != met.on_host.key
    assert [calls.name for calls in ledger.groups()] == ["the default group", "the default group, on the host"]


def test_only_what_has_changed_is_told_and_of_many_groups_each_in_its_turn() -> None:
    ledger, groups = CallLedger(), [Group() for _ in range(20)]
    of_group = [met.calls for number, group in enumerate(groups) if (met := ledger.meet(group, facts(str(number)))).calls]
    teller, told = Teller(ledger), list[int]()
    assert teller.news() == ()
    for calls in of_group:
        calls.add(CALLS[0])
    for _ in range(3):
        news = teller.news()
        assert len(news) <= MAX_TOLD
        assert teller.news() == news, "nothing is told by being asked for"
        teller.note(news)
        told += [count.group for count in news]
    assert sorted(told) == sorted(calls.key for calls in of_group)
    assert teller.news() == ()
    of_group[3].add(CALLS[1])
    assert teller.news() == (of_group[3].count(),)
    teller.forget()
    assert len(teller.news()) == MAX_TOLD


def test_a_watch_that_is_off_and_a_ledger_that_has_failed_tell_nothing() -> None:
    ledger, group = CallLedger(), Group()
    calls = ledger.meet(group, facts()).calls
    assert calls is not None
    calls.add(CALLS[0])
    teller, other = Teller(ledger), Teller(ledger)
    teller.is_on = False
    assert (teller.news(), len(other.news())) == ((), 1)
    ledger.stop()
    assert other.news() == ()


def test_recount_is_answered_also_for_a_group_that_is_not_known() -> None:
    ledger, group = CallLedger(), Group()
    calls = ledger.meet(group, facts("4", 0, 2)).calls
    assert calls is not None
    for number in (0, 1, 2):
        calls.add(CALLS[number])
    answer = ledger.recounted(Recount(9, calls.key, 2))
    assert (answer.number, answer.name, answer.size, answer.first, answer.count) == (9, "the group of ranks 0, 2", 2, 2, 3)
    assert [one.what for one in answer.calls] == ["all_reduce of 1 float32 (sum)", "all_reduce of 2 float32 (sum)"]
    unknown = ledger.recounted(Recount(9, calls.key + 1, 2))
    assert (unknown.size, unknown.count, unknown.calls) == (0, 0, ())


def test_as_the_process_ends_all_groups_tell_their_counts_or_their_last_calls() -> None:
    ledger, groups = CallLedger(), [Group() for _ in range(MAX_PARTING + 4)]
    for place, group in enumerate(groups):
        calls = ledger.meet(group, facts(str(place))).calls
        assert calls is not None
        for number in range(100 * (place > 0)):
            calls.add(CALLS[number % 3])
    told = list(ledger.last_words(with_calls=False))
    assert [(one.number, one.count, one.first, one.calls) for one in told] == [(LAST_WORDS, 100, 101, ())] * MAX_PARTING
    last = next(ledger.last_words(with_calls=True))
    assert (last.first, last.count, len(last.calls)) == (100 - MAX_CALLS + 1, 100, MAX_CALLS)
