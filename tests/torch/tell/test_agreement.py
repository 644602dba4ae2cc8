"""The start id: the same on all ranks of a launch, another one at the next launch, and never a reason to wait for long."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from rankwatch.shared.system.identity import Identity, identify
from rankwatch.tell import agreement
from rankwatch.tell.agreement import UNKNOWN, Start, shared_start, start_of

RANKS = [Identity("train", 0, rank, 2, rank, "node0", 100 + rank) for rank in range(2)]
PLACES = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "TIMEOUT", 60.0)


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    """The variables of ranks under torchrun, whose agents have a store."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del agents


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The same with a store that needs no connections."""
    agents = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(agreement, "_agents_store", lambda env: agents)
    return {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def agreed(env: dict[str, str], ranks: Sequence[Identity] = RANKS) -> set[str]:
    return {start.id for start in starts(env, ranks)}


def starts(env: dict[str, str], ranks: Sequence[Identity]) -> list[Start]:
    """What these ranks agree on, each of an agent of its own, in the order in which they ask."""
    return [start_of(who, None, "train", {**PLACES[who.rank], **env, "GROUP_RANK": str(who.rank)}) for who in ranks]


class Launch:
    """Processes that run until the end of the block."""

    def __init__(self, *restarts: int) -> None:
        self._restarts = restarts

    def __enter__(self) -> list[Identity]:
        self._running = ExitStack()
        ranks = zip(RANKS, self._restarts, strict=False)
        return [replace(who, restart=restart, pid=self._start()) for who, restart in ranks]

    def _start(self) -> int:
        process = self._running.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        return process.pid

    def __exit__(self, *exception: object) -> None:
        self._running.close()


def test_ranks_agree_through_the_store_of_torchruns_agents(store: dict[str, str]) -> None:
    with Launch(0, 0) as ranks:
        (first,) = agreed(store, ranks)
        assert agreed(store, ranks) == {first}  # a further model of the same processes
    with Launch(1, 1) as ranks:
        (second,) = agreed(store, ranks[::-1])
    assert len({first, second, UNKNOWN}) == 3


@pytest.mark.parametrize("restarts", [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("first", [0, 1])
def test_a_restart_that_not_every_agent_counts_is_one_new_start(
    hashed: dict[str, str], restarts: tuple[int, int], first: int
) -> None:
    """An agent counts the failures of its own ranks. Others see that it waits for them, and start their ranks anew as well."""
    with Launch(0, 0) as ranks:
        (before,) = agreed(hashed, ranks)
    with Launch(*restarts) as ranks:
        new = starts(hashed, [ranks[first], ranks[1 - first]])
        assert new[0] == new[1] == Start(new[0].id, "train", restarts[first], before)
        assert new[0].id != before


def test_a_restart_before_the_ranks_of_an_agent_have_asked_is_a_new_start(hashed: dict[str, str]) -> None:
    with Launch(0) as ranks:
        (before,) = agreed(hashed, ranks)
    with Launch(1, 1) as ranks:
        assert before not in agreed(hashed, ranks)


def of_one_agent(env: dict[str, str], who: Identity) -> Start:
    return start_of(who, None, "train", {**PLACES[who.rank], **env, "GROUP_RANK": "0"})


@pytest.mark.parametrize("restarts", [(0, 0), (1, 1)])
def test_of_an_agents_ranks_one_that_never_asked_before_sees_by_the_other_one_that_the_start_is_over(
    hashed: dict[str, str], restarts: tuple[int, int]
) -> None:
    """An agent does not count a restart because another node has come or gone."""
    with Launch(0) as ranks:
        before = of_one_agent(hashed, ranks[0])
    with Launch(*restarts) as ranks:
        second, first = of_one_agent(hashed, ranks[1]), of_one_agent(hashed, ranks[0])
    assert second == first != before
    assert (second.earlier, before.earlier) == (before.id, "")


def test_a_rank_that_never_asked_before_has_the_id_that_the_others_take_over_from(hashed: dict[str, str]) -> None:
    """Of an agent without other ranks: the collector knows by ``earlier`` that they are of one launch."""
    with Launch(0) as ranks:
        (before,) = starts(hashed, ranks)
    with Launch(0, 1) as ranks:
        second, first = starts(hashed, ranks[::-1])
    assert (second.id, first.earlier) == (before.id, before.id)
    assert first.id != before.id


def test_a_smaller_world_is_a_new_start(hashed: dict[str, str]) -> None:
    with Launch(0, 0) as ranks:
        (before,) = agreed(hashed, ranks)
        larger = [replace(who, world_size=3) for who in ranks]
        assert before not in agreed({**hashed, "WORLD_SIZE": "3"}, larger)


def test_a_second_process_that_says_it_is_the_rank_begins_no_launch(hashed: dict[str, str]) -> None:
    with Launch(0, 0) as ranks, Launch(0) as rivals:
        assert len(agreed(hashed, [ranks[0], *rivals, ranks[1]])) == 1


def test_ranks_that_know_other_names_of_their_job_agree_on_one(hashed: dict[str, str]) -> None:
    with Launch(0, 0) as ranks:
        jobs = [start_of(who, None, f"name-{who.rank}", {**PLACES[who.rank], **hashed}).job for who in ranks]
    assert jobs == ["name-0", "name-0"]


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
    assert start_of(alone, None, "", {}) == start_of(alone, None, "", {}) != start_of(replace(alone, pid=1), None, "", {})
