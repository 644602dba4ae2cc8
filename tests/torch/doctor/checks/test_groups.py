"""The doctor's collectives, on real gloo groups: two threads act as two ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from rankwatch.doctor.checks import device
from rankwatch.doctor.checks.groups import Group, WrongAnswer, measure_pair
from rankwatch.doctor.result import CheckState

Work = Callable[[Group], object]


def together(work: Work, lie: int = 0) -> list[object]:
    """The outcome on both ranks; the second rank believes its number is higher by ``lie``."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rank(number: int) -> object:
        group = Group("gloo", store, number, 2, torch.device("cpu"), 20)
        group.rank += lie * number
        try:
            return work(group)
        except WrongAnswer as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


COLLECTIVES: list[Work] = [Group.all_reduce, lambda group: group.broadcast(1), Group.all_gather]


@pytest.mark.parametrize("work", COLLECTIVES, ids=["all_reduce", "broadcast", "all_gather"])
def test_a_right_answer_and_a_wrong_one(work: Work) -> None:
    assert together(work) == [None, None]
    assert any(isinstance(outcome, WrongAnswer) for outcome in together(work, lie=1))


def test_a_wrong_answer_names_its_element() -> None:
    outcome, _ = together(Group.all_reduce, lie=4)
    assert str(outcome) == "wrong answer for 1 elements: 5 instead of 1 at element 0"


@pytest.mark.parametrize("budget", [20.0, 0.0], ids=["much", "little"])
def test_a_pair_of_ranks_reports_its_round_trip_and_bandwidth(budget: float) -> None:
    for result in together(lambda group: measure_pair(group, budget)):
        assert result.state is CheckState.OK  # type: ignore[attr-defined]
        assert set(result.figures) == {"round_trip", "bandwidth"}  # type: ignore[attr-defined]


def test_bytes_changed_in_transit_are_noticed() -> None:
    outcomes = together(lambda group: group.echo(1000, group.rank))  # the second rank sends back unexpected bytes
    assert [type(outcome) for outcome in outcomes] == [float, WrongAnswer]


def test_the_product_that_a_gpu_is_measured_by(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.product_is_right(torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor + (tensor == tensor.max()))
    assert not device.product_is_right(torch.device("cpu"))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15"),
        ("", "unknown"),
    ],
)
def test_the_version_of_a_driver(text: str, version: str) -> None:
    assert device.driver(text) == version


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rank_without_a_gpu_among_others_that_have_one() -> None:
    assert device.gpu("gloo", 0, 1).state in (CheckState.SKIP, CheckState.WARN)
    assert device.gpu("nccl", 0, 1).state is CheckState.FAIL


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_written_to_and_computes() -> None:
    assert device.gpu("nccl", 0, 1).state in (CheckState.OK, CheckState.WARN)
