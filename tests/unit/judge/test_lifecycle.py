"""The life of a batch: events in, effects out, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import environment
from rankwatch.judge.batch import PART_MOVES, BatchOrigin, BatchPart, BatchState, Gate, PartState
from rankwatch.judge.events import (
    BackwardReached,
    DirectCall,
    ForwardComes,
    PartIsFull,
    RootBegan,
    RootLeft,
    RootRaised,
    RootReturned,
    StepBegins,
    Steps,
)
from rankwatch.judge.lifecycle import DIRECT_FRAMES, LOOSE_FRAMES, NO_TASK, Abandon, Close, Effect, Event, Life, Release
from rankwatch.judge.pace.full_batches import FullBatches
from rankwatch.shared.types.frame import Moment, Position

MODULES = 3
"""Frames of a forward, and of a backward."""


@dataclass
class Frame:
    position: Position


@dataclass
class Training:
    """A life, and in the place of torch: what is called, in which order. ``closed``: the parts at their end, in order."""

    life: Life = field(default_factory=lambda: Life(0, FullBatches(), frozenset(), sends_at_once=False))
    closed: list[tuple[BatchPart, bool]] = field(default_factory=list)
    parts_sent: list[BatchPart] = field(default_factory=list)
    released: list[BatchPart] = field(default_factory=list)
    abandoned: list[BatchPart] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.life.judges_late = True

    @property
    def now(self) -> Steps:
        return Steps(self.steps, self.steps)

    def see(self, event: Event) -> list[Effect]:
        effects = self.life.handle(event)
        for effect in effects:
            match effect:
                case Close(part, awaits_loss):
                    part.close(0)
                    self.closed.append((part, awaits_loss))
                    self._judge(part)
                    if part.batch.is_streamed and part.is_sent_now:
                        self.parts_sent.append(part)
                case Abandon(part, _):
                    part.close(0)
                    self.abandoned.append(part)
                    self._judge(part)
                case Release(part):
                    self.released.append(part)
                    self.parts_sent.append(part)
        return effects

    def _judge(self, part: BatchPart) -> None:
        part.move(PartState.JUDGED)
        if part in self.life.closed:
            self.life.closed.remove(part)

    def call(self, number: int = MODULES) -> None:
        """Modules return, each with a frame."""
        for _ in range(number):
            batch = self.life.take(Frame(self.life.next))
            if batch is not None and self.life.passed(batch, is_early=False):
                self.see(PartIsFull(batch, self.now))

    def begin(self, origin: BatchOrigin | None, *, is_rehearsal: bool = False) -> BatchPart:
        self.see(ForwardComes(self.now))
        self.see(RootBegan(origin, self.now, is_rehearsal))
        self.call()
        return self.life.current.part

    def forward(self, origin: BatchOrigin | None = BatchOrigin.TRAINING, *, is_rehearsal: bool = False) -> BatchPart:
        part = self.begin(origin, is_rehearsal=is_rehearsal)
        self.see(RootReturned())
        self.see(RootLeft())
        return part

    def direct(self, origin: BatchOrigin = BatchOrigin.TRAINING_CALLS, number: int = MODULES) -> BatchPart:
        if self.life.begins_by_calls(origin):
            self.see(ForwardComes(self.now))
            self.see(DirectCall(origin, self.now))
        self.call(number)
        return self.life.of_forward.part

    def backward(self, *parts: BatchPart, task: int = 1) -> None:
        for part in parts:
            self.see(BackwardReached(part, task, self.now))
            self.life.begin_backward(part.batch)
            for _ in range(MODULES):
                batch = self.life.take_backward(Frame(part.batch.position))
                self.life.move_on(batch)

    def step(self) -> None:
        self.see(StepBegins(self.now))
        self.life.phase = "idle"
        self.steps += 1

    def sent(self) -> list[int]:
        """The batches whose parts were sent, in this order, each once."""
        return list(dict.fromkeys(part.first.batch for part in self.parts_sent if part.frames))


def test_a_batch_is_a_forward_its_backward_and_a_step() -> None:
    training = Training()
    for number in range(3):
        part = training.forward()
        assert (part.batch.state, part.first, training.life.phase) == (BatchState.BATCH, Position(number, 0, 0), "backward")
        training.backward(part)
        training.step()
    assert training.sent() == [0, 1, 2]
    assert [awaits for _, awaits in training.closed] == [True, False] * 3  # a forward with its loss, then its backward
    assert training.life.progress == Moment(2, 2, 0, 2 * MODULES)


def test_an_evaluation_is_judged_and_no_batch() -> None:
    training = Training()
    training.backward(training.forward())
    training.step()
    part = training.forward(None)
    assert (part.batch.state, part.first, training.life.phase) == (BatchState.EVAL, Position(0, 1, 0), "idle")
    training.backward(training.forward())
    assert training.sent() == [0, 1]


def test_a_candidate_is_held_until_a_backward_reaches_it() -> None:
    training = Training()
    part = training.forward(BatchOrigin.EVALUATING)
    assert (part.batch.state, part.gates) == (BatchState.RESERVED, {Gate.BACKWARD})
    assert training.sent() == []
    training.backward(part)
    assert (part.batch.state, training.released, training.sent()) == (BatchState.BATCH, [part], [0])


def test_a_candidate_that_no_backward_reaches_leaves_its_number_to_the_next_one() -> None:
    training = Training()
    lost = training.forward(BatchOrigin.EVALUATING)
    again = training.forward(BatchOrigin.EVALUATING)
    assert (lost.first, again.first) == (Position(0, 0, 0), Position(0, 0, MODULES))  # positions do not go back
    training.backward(again)
    assert training.sent() == [0]
    assert Gate.BACKWARD in lost.gates


def test_a_candidate_of_another_kind_has_no_number_until_a_backward_comes() -> None:
    training = Training()
    training.backward(training.forward())
    training.step()
    part = training.forward(BatchOrigin.EVALUATING)
    assert (part.batch.state, part.first) == (BatchState.CANDIDATE, Position(0, 1, 0))
    training.backward(part)
    assert (part.batch.state, part.first) == (BatchState.BATCH, Position(1, 0, 0))


def test_several_candidates_of_one_backward_are_one_batch() -> None:
    training = Training()
    first, second = training.forward(BatchOrigin.EVALUATING), training.forward(BatchOrigin.EVALUATING)
    training.backward(first, second)
    training.step()
    assert training.sent() == [0]
    assert first.frames[-1].position < second.frames[0].position


def test_micro_batches_of_a_pipeline_have_numbers_in_the_order_of_their_forwards() -> None:
    training = Training(Life(0, FullBatches(), frozenset(), sends_at_once=True))
    parts = [training.forward() for _ in range(4)]
    assert [part.first.batch for part in parts] == [0, 1, 2, 3]
    assert not any(awaits for _, awaits in training.closed)
    training.backward(*parts)
    training.step()
    assert training.sent() == [0, 1, 2, 3]


def test_a_rehearsal_measures_nothing() -> None:
    training = Training()
    part = training.forward(is_rehearsal=True)
    assert (part.frames, training.sent(), training.life.position.batch) == ([], [], -1)


def test_direct_calls_with_a_backward_are_a_batch() -> None:
    training = Training()
    for _ in range(2):
        part = training.direct()
        assert training.direct() is part  # they belong together until a backward, a step or a forward of the root
        training.backward(part)
        training.step()
    assert training.sent() == [0, 1]


def test_direct_calls_before_the_root_belong_to_its_batch() -> None:
    training = Training()
    part = training.direct()
    assert training.forward() is part
    assert part.batch.state is BatchState.BATCH


def test_calls_that_no_backward_reaches_are_not_held_without_end() -> None:
    training = Training()
    training.direct(number=DIRECT_FRAMES + 1)
    assert [len(part.frames) for part, _ in training.closed] == [DIRECT_FRAMES]
    outside = Training()
    outside.call(LOOSE_FRAMES)
    assert [len(part.frames) for part, _ in outside.closed] == [LOOSE_FRAMES]


def test_a_forward_that_raises_is_judged_and_not_sent() -> None:
    training = Training()
    part = training.begin(BatchOrigin.TRAINING)
    training.see(RootRaised(is_judged=True, runs_again=False))
    assert (training.abandoned, training.life.is_open, training.life.phase) == ([part], False, "idle")
    assert training.forward().first.batch == 1


def test_a_step_takes_what_no_hook_told_of() -> None:
    training = Training()
    part = training.forward(BatchOrigin.EVALUATING)
    assert training.life.candidate_before(0) is part
    training.step()
    assert training.life.candidate_before(1) is None


def test_no_move_leads_back() -> None:
    order = list(PartState)
    assert all(order.index(later) > order.index(state) for state, moves in PART_MOVES.items() for later in moves)


CALLS = st.sampled_from(["train", "eval mode", "no gradients", "calls", "raise", "back", "back all", "step"])


@given(st.lists(CALLS, max_size=30))
def test_whatever_is_called(calls: list[str]) -> None:
    """Positions never go back, and no part ends twice, though a backward may reach an earlier forward late."""
    training, reached, task = Training(), list[BatchPart](), NO_TASK
    position = training.life.position
    for call in calls:
        match call:
            case "train":
                reached.append(training.forward())
            case "eval mode":
                reached.append(training.forward(BatchOrigin.EVALUATING))
            case "no gradients":
                training.forward(None)
            case "calls":
                reached.append(training.direct())
            case "raise":
                training.begin(BatchOrigin.TRAINING)
                training.see(RootRaised(is_judged=True, runs_again=False))
            case "step":
                training.step()
                reached.clear()
            case back if reached:
                task += 1
                training.backward(*(reached if back == "back all" else reached[-1:]), task=task)
                reached.clear()
        assert training.life.position >= position
        position = training.life.position
    ended = [id(part) for part, _ in training.closed] + [id(part) for part in training.abandoned]
    assert len(ended) == len(set(ended))


@pytest.mark.parametrize("name", ["lifecycle", "batch"])
def test_no_torch_is_needed(name: str) -> None:
    code = f"import sys, rankwatch.judge.{name}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], env=environment(), text=True) == "False\n"
