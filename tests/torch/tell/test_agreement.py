"""The start id: the same on all ranks of a launch, another one at the next launch, and never a reason to wait for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from rankwatch.shared.identity import Identity, identify
from rankwatch.tell import agreement
from rankwatch.tell.agreement import UNKNOWN, shared_start, start_of

RANKS = [Identity("train", 0, rank, 2, rank, "node0", 100 + rank) for rank in range(2)]
PLACES = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)]


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    """The variables of ranks under torchrun, whose agents have a store."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del agents


def agreed(env: dict[str, str], restart: int = 0) -> set[str]:
    return {
        start_of(replace(who, restart=restart), None, {**place, **env}) for who, place in zip(RANKS, PLACES, strict=True)
    }


def test_ranks_agree_through_the_store_of_torchruns_agents(store: dict[str, str]) -> None:
    (first,), (second,) = agreed(store), agreed(store, restart=1)
    assert len({first, second, UNKNOWN}) == 3
    assert agreed(store) == {first}  # a further model of the same processes


def test_the_users_own_use_of_that_store_is_undisturbed(store: dict[str, str]) -> None:
    agreed(store)
    host, port = store["MASTER_ADDR"], int(store["MASTER_PORT"])
    stores: list[object] = []

    def join() -> None:
        stores.append(dist.TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False))  # type: ignore[attr-defined]

    joining = [threading.Thread(target=join) for _ in range(2)]
    for one in joining:
        one.start()
    for one in joining:
        one.join()
    assert len(stores) == 2


def test_a_store_that_does_not_answer_leaves_the_start_unknown(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(agreement, "TIMEOUT", 0.05)
    monkeypatch.setattr(agreement, "_agents_store", lambda env: never.wait(10))
    assert agreed(store) == {UNKNOWN}
    never.set()
    assert agreed({**store, "MASTER_PORT": "no port"}) == {UNKNOWN}


def test_a_start_id_given_by_hand_is_taken(store: dict[str, str]) -> None:
    assert agreed({**store, "RANKWATCH_START": "mine\n" + 100 * "x"}) == {"mine" + 60 * "x"}


def test_without_a_store_the_environment_that_all_ranks_share_decides() -> None:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    here, elsewhere = RANKS[0], replace(RANKS[0], host="node1")
    assert len(agreed(master)) == len(agreed({"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"})) == 1
    assert shared_start(here, master) != shared_start(elsewhere, master)  # two users, each on a machine of their own
    head = {**master, "MASTER_ADDR": "head"}
    assert shared_start(here, head) == shared_start(elsewhere, head) != shared_start(here, {**head, "MASTER_PORT": "1"})
    assert agreed({}) == {UNKNOWN}


def test_a_process_without_other_ranks_is_a_start_of_its_own() -> None:
    alone = identify({})
    assert start_of(alone, None, {}) == start_of(alone, None, {}) != start_of(replace(alone, pid=1), None, {})
