"""Notices: the batches left, the display order, and the text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from makers import notice
from rankwatch.shared.types.notice import Notice, NoticeKind, describe_notice


def test_batches_left_follow_the_growth() -> None:
    assert notice(value=65504 / 16, growth=1.0).batches_left == 4
    assert notice(value=65504 / 16, growth=0.5).batches_left == 8
    assert notice(value=1e6).batches_left == 0  # a float32 that would not fit
    for endless in (notice(growth=0.0), notice(growth=-1.0), notice(value=0.0), notice(dtype="")):
        assert endless.batches_left == math.inf


def test_approaching_overflow_is_the_most_urgent() -> None:
    far, near = notice(growth=0.1), notice(growth=1.0)
    early, late = notice(NoticeKind.ZEROS, since=3, value=0.1), notice(NoticeKind.UNDERFLOW, since=9)
    assert sorted([late, far, early, near], key=lambda one: one.urgency) == [near, far, early, late]


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (
            notice(),
            "next to overflow: layer (Linear), output: abs max 4,090 in batch 12 is 6% of float16's largest number "
            "and grows by x2 a batch: about 4 batches are left",
        ),
        (
            notice(NoticeKind.JUMP, module="", label="loss", value=4e6, growth=10.0),
            "a jump: (root) (Linear), loss: abs max 4e6 in batch 12 is x1,020 the largest of the batches before",
        ),
        (
            notice(module="", value=40000.0),
            "next to overflow: (root) (Linear), output: abs max 40,000 in batch 12 is 61% of float16's largest number "
            "and grows by x2 a batch: about 1 batch is left",
        ),
        (
            notice(value=65504.0, growth=-0.1),
            "next to overflow: layer (Linear), output: abs max 65,500 in batch 12 is 100% of float16's largest number "
            "and does not grow",
        ),
        (
            notice(value=64300.0, growth=math.log2(1.05)),
            "next to overflow: layer (Linear), output: abs max 64,300 in batch 12 is 98% of float16's largest number "
            "and grows by x1.05 a batch: the next batch may overflow",
        ),
        (
            notice(NoticeKind.UNDERFLOW, label="grad_output", value=3e-8, growth=0.0),
            "underflow: layer (Linear), grad_output: abs max 3e-8 in batch 12 is under 6.1e-5, "
            "the smallest normal float16; first in batch 10",
        ),
        (
            replace(notice(NoticeKind.PROBE, module=""), why="nan, as input[0] was abs max 3e38,"),
            "before a training: (root) (Linear), output: nan, as input[0] was abs max 3e38, in batch 12: no backward had come, "
            "and no optimizer had a parameter of the model, so nothing was stopped; if it was no trial, such as a count of "
            "operations, look at the data",
        ),
        (
            replace(notice(NoticeKind.TRIAL, value=3.0), why="inf"),
            "a trial: layer (Linear), output: inf in or after batch 12, with weights that code other than an optimizer wrote and "
            "took back, such as a step size that a line search rejects: the training went on without them (3 such trials since "
            "batch 10)",
        ),
        (
            replace(
                notice(NoticeKind.NO_GRADIENT, label="weight", value=57.0),
                why="it never had a gradient, though SGD holds it: what head (Linear) is given was cut off",
            ),
            "no gradient: layer (Linear), weight: in 57 steps it never had a gradient, though SGD holds it: what head (Linear) "
            "is given was cut off, by detach(), .data or NumPy; if that is meant, keep it out of the optimizer",
        ),
        (
            notice(NoticeKind.ZEROS, label="weight.grad", value=0.73, growth=0.1),
            "underflow: layer (Linear), weight.grad: 73% of the elements are zero in batch 12, "
            "a share that grows since batch 10",
        ),
    ],
)
def test_the_words(told: Notice, text: str) -> None:
    assert describe_notice(told) == text
