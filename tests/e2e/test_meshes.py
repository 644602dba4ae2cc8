"""How parameters lie on real ranks, and what is gathered of them, in every arrangement that torch has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs import finished, forked
from rankwatch.shared.types.fingerprint import NO_GATHER, FingerprintRow, RankMesh
from rankwatch_monitor.decide.replicas.table_layout import MeshLayout

BLOCK = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias", "scale")
NET = {
    *("first.weight", "first.bias", "head.bias", "last.weight", "last.bias"),  # head.weight is first.weight
    *(f"blocks.{number}.{name}" for number in (0, 1) for name in BLOCK),
}
OTHERS = {
    "ddp ignores": {"router.weight", "router.bias", "out.weight", "out.bias"},
    "experts": {"router.weight", "router.bias", "out.weight", "out.bias"},
    "marked": NET - {"last.weight", "last.bias"},
    "lora": NET | {"last.down.weight"},
    "dtensor replicate": NET | {"head.weight"},  # made one by one
    "dtensor partial": NET - {"last.bias"},
    "fsdp2 of an attention": {
        f"inner.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    },
    "fsdp2 expert parallel": {
        f"{module}.{name}" for module in ("router", "out", "experts.0", "experts.1") for name in ("weight", "bias")
    },
}

REPLICATED, SHARDED = (True,), (False,)
Laid = tuple[tuple[bool, ...], int, str, bool]
"""replicated, gathers, source, is_declared"""

DDP: Laid = (REPLICATED, NO_GATHER, "DDP", True)
LEARNED: Laid = (REPLICATED, NO_GATHER, "DDP", False)
NONE: Laid = (REPLICATED, NO_GATHER, "none", False)
FSDP: Laid = (SHARDED, 0, "FSDP", True)
HSDP: Laid = ((True, False), 1, "HSDP", True)

TENSOR: Laid = (SHARDED, NO_GATHER, "DTensor", True)
ALIKE: dict[Laid, tuple[str, ...]] = {
    NONE: ("plain", "experts", "marked", "dtensor partial"),
    DDP: (
        *("ddp", "ddp of a frozen part", "ddp after watch", "replicate", "ddp powersgd", "ddp fp16 of allreduce", "lora"),
        "ddp of pairs",
    ),
    LEARNED: ("ddp fp16 of noop", "ddp local sgd", "ddp own hook"),
    FSDP: (
        *("fsdp1", "fsdp1 flat", "fsdp1 after watch", "fsdp1 grad op", "fsdp1 mixed", "fsdp1 frozen"),
        *("fsdp2", "fsdp2 after watch", "fsdp2 frozen", "fsdp2 mixed", "fsdp2 offload", "fsdp2 kept"),
        *("fsdp2 of an attention", "fsdp2 of a group", "fsdp2 checkpointed", "fsdp2 resharded to two"),
    ),
    HSDP: ("fsdp1 hybrid", "fsdp1 hybrid by groups", "fsdp2 hybrid"),
    (REPLICATED, NO_GATHER, "DTensor", True): ("dtensor replicate",),
    (REPLICATED, NO_GATHER, "FSDP", True): ("fsdp1 no shard",),
    ((True, True), NO_GATHER, "HSDP", True): ("fsdp1 n by 1",),
    ((True, False), NO_GATHER, "HSDP", True): ("fsdp2 n by 1",),
}
"""The models of which all parameters lie alike."""

BESIDE_TP: dict[str, Laid] = {
    "": ((False, True), 0, "FSDP", False),
    "up": ((False, False), 0, "FSDP", True),
    "down.weight": ((False, False), 0, "FSDP", True),
    "down.bias": ((False, True), 0, "FSDP", True),
}
LAID: dict[str, dict[str, Laid]] = {
    **{name: {"": one} for one, names in ALIKE.items() for name in names},
    "ddp ignores": {"router": (REPLICATED, NO_GATHER, "DDP ignores it", False), "out": DDP},
    "nested": {"": NONE, "blocks.0": DDP, "blocks.1": FSDP},
    "tp": {"": NONE, "up": TENSOR, "down.weight": TENSOR, "down.bias": (REPLICATED, NO_GATHER, "DTensor", True)},
    "fsdp2 ignored": {"": FSDP, "blocks.0.scale": NONE, "last.bias": NONE},
    "fsdp2 columns": {"": FSDP, "down.weight": (SHARDED, NO_GATHER, "FSDP", True)},
    "ddp tp": {
        "": DDP,
        "up": ((True, False), NO_GATHER, "DDP", True),
        "down.weight": ((True, False), NO_GATHER, "DDP", True),
        "down.bias": ((True, True), NO_GATHER, "DDP", True),
    },
    "fsdp2 tp": BESIDE_TP,
    "fsdp2 tp mixed": BESIDE_TP,
    "fsdp2 expert parallel": {"": FSDP, "experts": ((False, False), 0, "FSDP", True)},
}
"""By the longest part of the parameter's name."""

ON_TWO = ["ddp ignores", "fsdp1", "fsdp2 mixed"]
"""Nothing is special of two ranks."""


class Ranks:
    """What the ranks found in one case."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        self._found = found
        self.rows = [{one[0]: FingerprintRow(*one) for one in rank["rows"]} for rank in found]
        self.meshes = [[_mesh(one) for one in rank["meshes"]] for rank in found]
        self.inputs = [rank["inputs"] and _mesh(rank["inputs"]) for rank in found]
        self.own = [rank["own"] for rank in found]
        self.gathered = [rank["gathered"] for rank in found]

    def mesh(self, rank: int, name: str) -> RankMesh:
        return self.meshes[rank][self.rows[rank][name].mesh]


def _mesh(found: list[Any]) -> RankMesh:
    ranks, shape, replicated, gathers, source, is_declared = found
    return RankMesh(tuple(ranks), tuple(shape), tuple(replicated), gathers, source, is_declared)


def laid(ranks: int, *cases: str) -> dict[str, Ranks]:
    done = finished(forked("meshes.py", *cases, ranks=ranks))
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: Ranks(found) for name, found in json.loads(done.stdout[done.stdout.index("{") :]).items()}


def check(name: str, ranks: Ranks, expected: dict[str, Laid]) -> None:
    for rank, rows in enumerate(ranks.rows):
        assert set(rows) == OTHERS.get(name, NET)
        for parameter, row in rows.items():
            mesh = ranks.mesh(rank, parameter)
            longest = max((key for key in expected if key in parameter), key=len)
            assert (mesh.replicated, mesh.gathers, mesh.source, mesh.is_declared) == expected[longest], parameter
            check_values(ranks, rank, row, mesh)


def check_values(ranks: Ranks, rank: int, row: FingerprintRow, mesh: RankMesh) -> None:
    """Replicas hold the same, shards hold it all, and the shares of shards add up to what is gathered."""
    name = row.parameter
    replicas = mesh.replicas_of(rank)
    assert rank in replicas
    assert all(ranks.own[other][name] == ranks.own[rank][name] for other in replicas)
    assert sum(ranks.own[other][name][1] for other in mesh.ranks) == row.numel * len(replicas)
    assert (name in ranks.gathered[rank]) == (mesh.gathers != NO_GATHER)
    if mesh.gathers != NO_GATHER:
        shards = MeshLayout(mesh).shards_of(rank) or (rank,)
        assert sum(ranks.own[other][name][1] for other in shards) == ranks.gathered[rank][name][2]
        assert (sum(ranks.gathered[other][name][0] for other in shards) - ranks.gathered[rank][name][1]) % 2**64 == 0


@pytest.fixture(scope="module")
def four() -> dict[str, Ranks]:
    return laid(4)


@pytest.mark.slow
def test_how_they_lie_on_two_ranks() -> None:
    for name, ranks in laid(2, *ON_TWO).items():
        check(name, ranks, LAID[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAID)
def test_how_they_lie_on_four_ranks(four: dict[str, Ranks], name: str) -> None:
    check(name, four[name], LAID[name])


@pytest.mark.slow
def test_tables_are_the_same_on_all_ranks_of_a_mesh(four: dict[str, Ranks]) -> None:
    for name, ranks in four.items():
        for rank, rows in enumerate(ranks.rows):
            for parameter, row in rows.items():
                for other in ranks.mesh(rank, parameter).ranks:
                    assert ranks.rows[other][parameter] == row, name
                    assert ranks.mesh(other, parameter) == ranks.mesh(rank, parameter), name


@pytest.mark.slow
def test_what_is_frozen(four: dict[str, Ranks]) -> None:
    for name in ("ddp of a frozen part", "fsdp1 frozen", "fsdp2 frozen"):
        for rows in four[name].rows:
            assert all(row.is_trainable == ("blocks.0." not in parameter) for parameter, row in rows.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "differ"),
    [
        ("plain", set()),
        ("tp", set()),
        ("dtensor replicate", set()),
        ("ddp", {1, 2, 3}),
        ("ddp of pairs", {2}),
        ("ddp tp", {2}),
        ("fsdp1", {1, 2, 3}),
        ("fsdp1 hybrid", {1, 2, 3}),
        ("fsdp2 hybrid", {1, 2, 3}),
        ("fsdp2 tp", {2}),
        ("fsdp2 expert parallel", {2, 3}),
    ],
)
def test_which_ranks_must_be_fed_other_data_than_rank_0(four: dict[str, Ranks], name: str, differ: set[int]) -> None:
    inputs = four[name].inputs[0]
    assert (set() if inputs is None else set(inputs.ranks) - set(inputs.replicas_of(0))) == differ
