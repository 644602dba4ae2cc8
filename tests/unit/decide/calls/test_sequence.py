"""What the members of one group called, compared by points that meet or do not, over ranks that are played."""

from __future__ import annotations

from collections.abc import Sequence as Calls
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.types.calls import MAX_CALLS, CollectiveCall
from rankwatch_monitor.decide.calls.differs import How, Tail, UnequalCalls
from rankwatch_monitor.decide.calls.sequence import ANSWERS_WITHIN, MOST_POINTS, NO_BATCH, NO_HURRY, Question, Sequence

KEPT = 1024


def call(kind: int) -> CollectiveCall:
    return CollectiveCall(kind, f"kind{kind}", f"train.py:{kind}")


def digest_of(kinds: Calls[int]) -> int:
    return hash((*kinds, len(kinds))) & (2**63 - 1)


@dataclass
class Group:
    """Ranks that call ``kinds``, each its own, and one sequence that compares them. ``called``: how many each has by now."""

    kinds: list[list[int]]
    kept: int = KEPT

    def __post_init__(self) -> None:
        self.called = [0 for _ in self.kinds]
        self.batches = [0 for _ in self.kinds]
        self.sequence = Sequence(7)
        self.found: list[UnequalCalls] = []
        self.asked = 0
        self.now = 0.0
        self.mute: set[int] = set()

    def call(self, rank: int, count: int, *, ends_step: bool = True) -> None:
        """A rank has called this many by now, and tells them."""
        count = self.called[rank] = min(count, len(self.kinds[rank]))
        if count:
            batch = self.batches[rank] = self.batches[rank] + ends_step
            self.sequence.take(rank, count, digest_of(self.kinds[rank][:count]), batch if ends_step else NO_BATCH)
        self._conclude()
        if self.sequence.wants(self.now):
            self.ask()

    def wait(self) -> None:
        """Nothing comes for long."""
        self.now += NO_HURRY + 1
        self._conclude()

    def _conclude(self) -> list[Question]:
        told = list(self.sequence.conclude(self.now))
        self.found += [one for one in told if isinstance(one, UnequalCalls)]
        return [one for one in told if isinstance(one, Question)]

    def ask(self) -> None:
        self._answer(self.sequence.ask(lambda _: True, self.now))

    def press(self, *first: int) -> None:
        everyone = range(len(self.kinds))
        self._answer(self.sequence.press(first, lambda rank: rank not in self.mute, self.now, everyone))

    def _answer(self, questions: list[Question]) -> None:
        while questions:
            self.asked += len(questions)
            for rank, first in questions:
                if rank not in self.mute:
                    self.sequence.answer(rank, "the default group", len(self.kinds), self._tail(rank, first))
            if self.mute:
                self.now += ANSWERS_WITHIN + 1
            questions = self._conclude()

    def _tail(self, rank: int, first: int) -> Tail:
        count = self.called[rank]
        first = max(first, count - self.kept + 1)
        return Tail(first, count, [call(kind) for kind in self.kinds[rank][first - 1 : count][:MAX_CALLS]])

    def train(self, steps: int, per_step: int) -> None:
        """All ranks end step after step, each after what it calls in this many."""
        for step in range(1, steps + 1):
            for rank, kinds in enumerate(self.kinds):
                shift = len(kinds) - min(map(len, self.kinds))
                self.call(rank, step * per_step + shift if len(kinds) else 0)


def first_difference(one: Calls[int], other: Calls[int]) -> int:
    return next((place + 1 for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)


CHANGES = st.sampled_from(["insert", "delete", "replace", "swap"])


@given(st.data())
def test_one_change_on_one_rank_is_found_with_its_number_and_sides(data: st.DataObject) -> None:
    steps, per_step = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 40))
    base = data.draw(st.lists(st.integers(0, 3), min_size=steps * per_step, max_size=steps * per_step))
    world = data.draw(st.integers(2, 5))
    odd = data.draw(st.integers(0, world - 1))
    at, change = data.draw(st.integers(0, len(base) - 1)), data.draw(CHANGES)
    kinds = list(base)
    if change == "insert":
        kinds.insert(at, data.draw(st.integers(0, 4)))
    elif change == "delete":
        del kinds[at]
    elif change == "replace":
        kinds[at] = 5
    elif at + 1 < len(kinds):
        kinds[at], kinds[at + 1] = kinds[at + 1], kinds[at]
    shift = len(kinds) - len(base)
    group = Group([kinds if rank == odd else list(base) for rank in range(world)])
    # Each rank's messages are late by some steps of its own.
    tail = data.draw(st.lists(st.integers(0, 3), min_size=3 * per_step, max_size=3 * per_step))
    group.kinds = [[*own, *tail] for own in group.kinds]
    told = [0] * world
    while any(step < steps + 3 for step in told):
        rank = data.draw(st.sampled_from([rank for rank, step in enumerate(told) if step < steps + 3]))
        told[rank] += 1
        count = told[rank] * per_step
        has_changed = rank == odd and (count + shift > at)
        group.call(rank, count + shift if has_changed else count)
    expected = first_difference(group.kinds[odd], group.kinds[(odd + 1) % world])
    is_seen_at_once = change == "replace" or 4 in kinds
    if (
        group.sequence.found is None and not is_seen_at_once
    ):  # an equal call more shows only later, where points that meet none are asked for seldom
        group.press(*range(world))
    assert group.sequence.found is not None or not is_seen_at_once
    found = group.sequence.found
    if not expected or expected > min(map(len, group.kinds)):
        assert found is None  # one is the beginning of the other
        return
    assert found is not None
    assert (found.number, found.is_first, len(found.sides)) == (expected, True, 2)
    by_rank = {rank: side.what for side in found.sides for rank in side.ranks}
    assert by_rank[odd] == f"kind{group.kinds[odd][expected - 1]}"
    others = {what for rank, what in by_rank.items() if rank != odd}
    assert others == {f"kind{group.kinds[(odd + 1) % world][expected - 1]}"}
    if world > 2 and len(by_rank) == world:
        assert found.odd.ranks == (odd,)
    assert len(group.found) == 1


@given(st.data())
def test_equal_calls_are_never_told_whatever_the_points(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=200))
    world = data.draw(st.integers(1, 5))
    group = Group([list(kinds) for _ in range(world)], kept=data.draw(st.integers(1, 64)))
    for _ in range(data.draw(st.integers(0, 60))):
        rank = data.draw(st.integers(0, world - 1))
        if data.draw(st.integers(0, 19)) == 0 and world > 1:
            group.sequence.forget(rank)
        more = data.draw(st.integers(0, 20))
        group.call(rank, group.called[rank] + more, ends_step=data.draw(st.booleans()))
        late = data.draw(st.integers(0, group.called[rank]))
        if late:  # a batch that waited in a spool
            group.sequence.take(rank, late, digest_of(kinds[:late]), 0)
        if data.draw(st.integers(0, 9)) == 0 and group.sequence.members:
            group.press(rank)
    assert not [one for one in group.found if one.how is not How.AWAITED]
    for found in group.found:
        assert found.sides[1].what == f"kind{kinds[found.number - 1]}"


def test_points_that_meet_need_no_question() -> None:
    group = Group([[1, 2, 3, 2] * 50 for _ in range(4)])
    group.train(40, 5)
    assert (group.asked, group.found) == (0, [])
    assert all(not member.points for member in group.sequence.members.values())


def test_points_that_never_meet_are_asked_for_ever_more_seldom() -> None:
    group = Group([[1, 2] * 2000 for _ in range(2)])
    for step in range(1, 301):
        group.call(0, 10 * step)
        group.call(1, 10 * step - 5)
    assert not group.found
    assert 2 <= group.asked // 2 <= 8


def test_one_barrier_more_is_found_two_steps_later() -> None:
    step = [1, 1, 2, 3]
    group = Group([[*step, 9, *step * 9], *(step * 10 for _ in range(3))])
    for number in range(1, 4):
        group.call(0, 4 * number + (number > 1))
        for rank in (1, 2, 3):
            group.call(rank, 4 * number)
    (found,) = group.found
    assert (found.number, found.how) == (5, How.MORE)
    assert found.text == (
        "rank 0 called a collective that ranks 1-3 did not: its 5th of the default group is kind9 at train.py:9; that of "
        "ranks 1-3 is kind1 at train.py:1; they were equal up to the 4th"
    )


def test_one_call_that_is_another_one_among_equal_calls_is_not_one_more() -> None:
    group = Group([[1] * 10 + [5] + [1] * 30, *([1] * 41 for _ in range(2))])
    group.train(7, 4)
    (found,) = group.found
    assert (found.number, found.how) == (11, How.OTHER)


def test_it_is_not_called_one_more_where_the_batches_are_forgotten_that_would_say_so() -> None:
    group = Group([[1] * 6 + [5] + [1] * 53, *([1] * 60 for _ in range(2))])
    for step in range(1, 61):
        group.call(0, step)
    group.called[1:] = [60, 60]  # what they tell comes late
    for step in range(1, 8):
        group.sequence.take(1, step, digest_of([1] * step), step)
    group.ask()
    group.wait()
    (found,) = group.found
    assert (found.number, found.how) == (7, How.OTHER)


def test_one_call_more_among_equal_calls_is_one_more() -> None:
    group = Group([[1] * 6 + [5] + [1] * 30, *([1] * 36 for _ in range(2))])
    for step in range(1, 20):
        group.call(0, step + (step > 6))
        for rank in (1, 2):
            group.call(rank, step)
    (found,) = group.found
    assert (found.number, found.how) == (7, How.MORE)


def test_of_very_many_members_eight_are_asked_and_the_others_stand_by_their_digests() -> None:
    good, bad = [1, 2, 3, 4] * 20, [1, 2, 3, 4] * 10 + [1, 7, 3, 4] * 10
    group = Group([bad if rank == 77 else good for rank in range(200)])
    group.train(12, 4)
    (found,) = group.found
    assert (found.number, found.odd.ranks, found.how) == (42, (77,), How.OTHER)
    # Of the others those count that have told a point by now.
    assert found.sides[1].count >= 77
    assert len(found.sides[1].ranks) == 64
    assert group.asked == 8


def test_calls_that_are_forgotten_are_not_said_to_be_equal() -> None:
    group = Group([[9, *[1, 2] * 100], [1, 2] * 100], kept=8)
    group.call(0, 100)
    group.call(1, 100)
    (found,) = group.found
    assert (found.number, found.is_first) == (93, False)
    assert found.text.endswith("what they called before is not known any more")


def test_a_difference_that_no_call_shows_is_not_told_and_not_asked_for_again() -> None:
    group = Group([[9, *[1] * 400], [1] * 401], kept=8)
    for count in range(100, 400, 10):
        group.call(0, count)
        group.call(1, count)
    assert not group.found
    assert group.asked == 2


def test_the_rank_that_has_not_called_is_awaited() -> None:
    group = Group([[1, 2] * 100 for _ in range(3)])
    for rank in range(3):
        group.call(rank, 120)
    group.call(0, 131)
    group.call(2, 131)
    group.call(1, 130)
    group.press(1)
    (found,) = group.found
    assert (found.number, found.how, found.odd.ranks) == (131, How.AWAITED, (1,))
    assert found.text == (
        "all called the same; rank 1 has not called the 131st of the default group (kind1 at train.py:1 on ranks 0, 2)"
    )


def test_a_rank_that_has_called_nothing_is_awaited_too() -> None:
    group = Group([[1], [1]])
    group.call(0, 1)
    group.press(0)
    assert [(one.number, one.odd.ranks, one.how) for one in group.found] == [(1, (1,), How.AWAITED)]


def test_a_rank_that_does_not_answer_is_not_waited_for() -> None:
    group = Group([[1, 2] * 100 for _ in range(3)])
    for rank in range(3):
        group.call(rank, 20)
    group.call(0, 31)
    group.mute = {1}
    group.press(1)
    (found,) = group.found
    assert (found.number, found.odd.ranks) == (21, (2,))  # of rank 1 it is not known


def test_what_a_hostile_rank_tells_finds_little_room() -> None:
    sequence = Sequence(7)
    sequence.take(0, 1, 1, 0)
    for count in range(2, 5000):
        sequence.take(1, count, count)
    assert len(sequence.members[1].points) == MOST_POINTS
    assert sum(map(len, sequence._ahead.values())) == MOST_POINTS
