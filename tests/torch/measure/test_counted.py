"""What ranks that really communicate count of their collectives: the same on all members of a group, or not, as it was called."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from jobs import environment, forked

pytestmark = pytest.mark.slow

ALIKE = [
    *(
        "every_kind",
        "one_line_for_each_rank",
        "subgroups",
        "objects",
        "fsdp1",
        "fsdp2",
        "tensor_parallel",
        "context_parallel",
    ),
    *("uneven_experts", "uneven_gathers", "ddp", "ddp_with_buffers", "unused_parameters", "joined", "zero_redundancy"),
    *("saved", "saved_beside", "later", "coalesced", "pairs", "group_that_ends", "made_again"),
]
ARE_DISPATCHED = hasattr(torch.distributed.ProcessGroup, "register_pre_hook")
OF_FOUR = ["mesh", "subgroups", "fsdp2", "joined"]

SUM = "all_reduce of 8 float32 (sum)"
DIFFERENT = {
    "one_barrier_more": (2, "barrier", SUM),
    "another_kind": (2, "broadcast of 8 float32 from rank 0", SUM),
    "another_size": (1, SUM, "all_reduce of 9 float32 (sum)"),
    "another_dtype": (1, SUM, "all_reduce of 8 float64 (sum)"),
    "another_op": (1, SUM, "all_reduce of 8 float32 (max)"),
    "another_root": (1, "broadcast of 8 float32 from rank 0", "broadcast of 8 float32 from rank 1"),
    "another_order": (1, "all_reduce of 4 float32 (sum)", SUM),
    "object_exchange": (1, "all_gather_object", SUM),
}
"""The number of the first call that differs, and what rank 0 and rank 1 have called there."""

Noted = dict[str, dict[str, Any]]
"""What a rank knows of each group, by its key."""


class Calls:
    """What each rank noted after each name."""

    def __init__(self, folder: Path, ranks: int, *names: str) -> None:
        command = forked("calls.py", str(folder), *names, ranks=ranks)
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        self._folder, self._ranks = folder, range(ranks)

    def noted(self, name: str) -> list[Noted]:
        return [json.loads((self._folder / f"{name}-{rank}.json").read_text()) for rank in self._ranks]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return Calls(tmp_path_factory.mktemp("two"), 2, *ALIKE)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return Calls(tmp_path_factory.mktemp("four"), 4, *OF_FOUR)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return Calls(tmp_path_factory.mktemp("unequal"), 2, *DIFFERENT)


def check_alike(noted: list[Noted]) -> None:
    """All members of a group know it by one key, and have called the same."""
    for key, found in [one for each in noted for one in each.items()]:
        members = [each[key] for each in noted if key in each]
        assert len(members) == found["size"]
        assert {(one["calls"], one["digest"]) for one in members} == {(found["calls"], found["digest"])}


@pytest.mark.parametrize("name", ALIKE)
def test_members_that_call_the_same_count_the_same(two: Calls, name: str) -> None:
    check_alike(two.noted(name))


@pytest.mark.parametrize("name", OF_FOUR)
def test_so_do_those_of_several_groups(four: Calls, name: str) -> None:
    check_alike(four.noted(name))


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_first_call_that_differs_is_known(unequal: Calls, name: str) -> None:
    number, *expected = DIFFERENT[name]
    sides = [list(noted.values())[-1] for noted in unequal.noted(name)]
    assert len({side["digest"] for side in sides}) == 2
    first, second = (side["last"] for side in sides)
    assert first[: number - 1] == second[: number - 1]
    assert [told[number - 1].rpartition(" at ")[0] for told in (first, second)] == expected


def since(calls: Calls, name: str, before: str | None) -> list[str]:
    """The calls of rank 0 in the default group for this name."""

    def default(name: str) -> dict[str, Any]:
        return next(found for found in calls.noted(name)[0].values() if found["name"] == "the default group")

    first = default(before)["calls"] if before else 0
    found = default(name)
    last: list[str] = found["last"]
    return last[len(last) - (found["calls"] - first) :]


def test_a_call_is_told_by_what_must_be_alike_and_by_its_line(two: Calls) -> None:
    told = [line.rpartition(" at ") for line in since(two, "every_kind", None)]
    assert [what for what, _, _ in told] == [
        "all_reduce of 8 float32 (sum)",
        "broadcast of 8 float32 from rank 1",
        "reduce of 8 float32 (sum) to rank 0",
        "all_gather",
        "all_gather_into_tensor of 8 float32",
        "reduce_scatter_tensor of 16 float32 (max)",
        "gather to rank 0",
        "scatter from rank 1",
        "barrier",
        "monitored_barrier",
    ]
    assert all(site.endswith(" in every_kind") and "calls.py:" in site for _, _, site in told)


def test_an_exchange_of_objects_is_told_as_what_the_user_has_called(two: Calls) -> None:
    told = [line.rpartition(" at ")[0] for line in since(two, "objects", "subgroups")]
    assert list(dict.fromkeys(what.partition(" ")[0] for what in told)) == [
        *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    ]


def test_what_ddp_calls_in_c_counts_as_one_call_each(two: Calls) -> None:
    for name, before, expected in (
        ("ddp", "uneven_gathers", ["DDP's backward, of the forward"] * 3),
        ("ddp_with_buffers", "ddp", ["DDP's buffers, of the forward", "DDP's backward, of the forward"] * 2),
    ):
        told = [line.rpartition(" at ")[0] for line in since(two, name, before)]
        assert [what for what in told if what.startswith("DDP's ")] == expected
        buckets = {what.partition(" ")[0] for what in told} - {"DDP's"}
        assert buckets <= {"all_reduce", "all_gather", "broadcast"} if ARE_DISPATCHED else not buckets


@pytest.mark.skipif(not ARE_DISPATCHED, reason="process groups tell of what C++ calls from torch 2.14 on")
def test_what_is_called_in_c_is_counted_by_its_line_in_python(tmp_path: Path) -> None:
    first, second = (
        list(noted.values())[-1]["last"] for noted in Calls(tmp_path, 2, "one_more_in_c").noted("one_more_in_c")
    )
    assert [line.rpartition(" at ")[0] for line in first] == [SUM, "all_reduce of 8 float32", "barrier"]
    assert [line.rpartition(" at ")[0] for line in second] == [SUM, "barrier"]
    assert first[1].endswith(" in one_more_in_c")


def test_sends_and_receives_are_not_counted(two: Calls) -> None:
    assert len(since(two, "pairs", "coalesced")) == 1
