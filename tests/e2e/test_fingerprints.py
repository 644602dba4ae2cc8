"""What real ranks say of their weights, step by step: replicas the same, and shards what is gathered of them."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from jobs import finished, forked
from rankwatch.shared.fingerprint import ALL_ROWS, LANE_BYTES

pytestmark = pytest.mark.slow

REPLICATED = ("ddp", "wrapped_later")
SHARDED = ("fsdp2", "fsdp2_later_in_bfloat16", "fsdp1", "fsdp1_flat")
OTHERS = ("joined", "without_sync", "hsdp_without_all_reduce")

Told = list[list[dict[str, Any]]]
"""By rank, and in the order in which they were sent."""


@pytest.fixture(scope="module")
def told() -> dict[str, Told]:
    command = forked("fingerprints.py", *REPLICATED, *SHARDED, *OTHERS)
    done = finished(command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def moments(fingerprints: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(one["era"], one["ordinal"]) for one in fingerprints]


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_say_the_same(told: dict[str, Told], name: str) -> None:
    first, second = told[name]
    assert len(first) == 6
    assert [one["lanes"] for one in first] == [one["lanes"] for one in second]
    assert first[0]["slot"] == ALL_ROWS
    assert all(one["sources"] == ["DDP"] and not one["is_local"] for one in first)
    assert all(one["inputs"] != other["inputs"] for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_what_is_gathered_of_them(told: dict[str, Told], name: str) -> None:
    first, second = told[name]
    assert len(first) == 6
    for one, other in zip(first, second, strict=True):
        assert one["rows"] == other["rows"]
        pairs = [bytes.fromhex(rank["gathers"]) for rank in (one, other)]
        assert len(pairs[0]) == 2 * LANE_BYTES * len(one["rows"])
        for number in range(len(one["rows"])):
            (share, _, whole, last), (rest, _, same, again) = (
                struct.unpack_from("<4Q", pair, 32 * number) for pair in pairs
            )
            assert (share + rest) % 2**64 == whole == same
            assert last == again


def test_a_new_era_begins_where_counts_of_steps_may_come_apart(told: dict[str, Told]) -> None:
    first, second = told["joined"]
    assert moments(first) == [(era, step) for era, steps in ((1, 3), (3, 3), (4, 2)) for step in range(steps)]
    assert moments(second) == [(era, step) for era, steps in ((1, 5), (3, 5), (4, 2)) for step in range(steps)]
    assert [one["step"] for one in first][-2:] == [6, 7]
    begins = [{moment: one["lanes"] for moment, one in zip(moments(rank), rank, strict=True)} for rank in (first, second)]
    assert all(begins[0][era, 0] == begins[1][era, 0] for era in (1, 3, 4))


def test_a_step_upon_gradients_that_were_not_synchronised(told: dict[str, Told]) -> None:
    for name, local in (("without_sync", [False] * 4 + [True] * 2), ("hsdp_without_all_reduce", [False] * 3 + [True])):
        for rank in told[name]:
            assert [one["is_local"] for one in rank] == local, name
