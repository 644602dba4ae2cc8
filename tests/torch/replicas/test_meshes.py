"""Rows of a table, in one process. ``e2e/test_meshes.py`` has how they lie on ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwatch.replicas.data_parallel import is_synchronising
from rankwatch.replicas.meshes import lay_out
from rankwatch.shared.types.fingerprint import ALL_ROWS


def names(root: nn.Module) -> list[str]:
    return [row.parameter for row in lay_out(root, None, 1).table.rows]


def apart(root: nn.Module) -> set[str]:
    return {one.row.parameter for one in lay_out(root, None, 1).apart}


def test_a_row_for_each_parameter_by_its_first_name() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Sequential(second, nn.BatchNorm1d(3)))
    assert names(model) == ["0.weight", "0.bias", "1.0.bias", "1.1.weight", "1.1.bias"]


def test_what_has_no_values_has_no_row() -> None:
    model = nn.ModuleDict(
        {"lazy": nn.LazyLinear(3), "meta": nn.Linear(2, 2, device="meta"), "none": nn.ParameterList([torch.rand(0)])}
    )
    assert names(model) == []
    assert apart(model) == set()


def test_own_values_follow_a_parameter_that_is_replaced() -> None:
    model = nn.Linear(2, 2)
    laid = lay_out(model, None, 1)
    weight = next(one for one in laid.parameters if one.row.parameter == "weight")
    model.weight = nn.Parameter(torch.full((2, 2), 7.0))
    own = weight.own()
    assert own is not None
    assert own.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert not own.requires_grad
    del model.weight
    assert weight.own() is None


def test_slots_are_filled_evenly_by_bytes() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=dtype) for dtype in (torch.float32, torch.float64) for _ in range(20)))
    table = lay_out(model, None, 1, slots=4).table
    assert table == lay_out(model, None, 1, slots=4).table
    assert {row.slot for row in table.rows_of(ALL_ROWS)} == {0, 1, 2, 3}
    sizes: Counter[int] = Counter()
    for row in table.rows:
        sizes[row.slot] += row.numel * getattr(torch, row.dtype).itemsize
    assert max(sizes.values()) - min(sizes.values()) <= 64 * 8  # of the largest parameter


def test_stages_of_a_pipeline_stand_apart() -> None:
    laid = lay_out(nn.Linear(2, 2), None, 2, is_piped=True)
    assert laid.table.rows == ()
    assert {one.row.parameter for one in laid.apart} == {"weight", "bias"}


def test_whatever_may_be_an_expert_stands_apart_where_tokens_are_shuffled() -> None:
    model = nn.ModuleDict({"router": nn.Linear(2, 2), "ffn": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    laid = lay_out(model, None, 2, is_shuffled=True)
    assert {row.parameter for row in laid.table.rows} == {"router.weight", "router.bias", "norm.weight", "norm.bias"}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2, bias=False)
        self.gate = nn.Linear(2, 2, bias=False)
        self.norm = nn.LayerNorm(2, bias=False)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2, bias=False)
        self.shared_expert_gate = nn.Linear(2, 2, bias=False)
        self.norm = nn.LayerNorm(2, bias=False)
        self.parts = nn.ModuleList([Expert()])


class ExpertLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.mlp = MixtureOfExperts()
        self.expert_router = nn.Linear(2, 2, bias=False)
        self.local_experts = nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(2, 2, bias=False)})])


def test_experts_stand_apart_but_not_what_chooses_among_them() -> None:
    model = ExpertLanguageModel()
    assert set(names(model)) == {
        *("first.weight", "expert_router.weight"),
        *("mlp.gate.weight", "mlp.shared_expert_gate.weight", "mlp.norm.weight"),
    }
    assert apart(model) == {
        *("mlp.parts.0.up.weight", "mlp.parts.0.gate.weight", "mlp.parts.0.norm.weight"),
        "local_experts.0.gate.weight",
    }


def test_modules_whose_class_says_that_they_hold_shards_stand_apart() -> None:
    class ColumnParallelLinear(nn.Linear):
        pass

    class ParallelLayerNorm(nn.LayerNorm):
        pass

    model = nn.Sequential(ParallelLayerNorm(2, bias=False), ColumnParallelLinear(2, 2, bias=False))
    assert (set(names(model)), apart(model)) == ({"0.weight"}, {"1.weight"})


@pytest.mark.parametrize(
    ("mark", "value", "is_own"),
    [
        ("tensor_model_parallel", True, True),
        ("tensor_model_parallel", False, False),
        ("partition_dim", 0, True),
        ("partition_dim", -1, False),
        ("allreduce", False, True),
        ("allreduce", True, False),
        ("is_expert", True, True),
        ("group_name", "ep_size_2", True),
    ],
)
def test_parameters_that_a_framework_marks_as_a_ranks_own(mark: str, value: object, is_own: bool) -> None:
    model = nn.Linear(2, 2, bias=False)
    setattr(model.weight, mark, value)
    assert apart(model) == ({"weight"} if is_own else set())


def test_which_communication_hooks_synchronise() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import (
        debugging_hooks,
        default_hooks,
        post_localSGD_hook,
        powerSGD_hook,
        quantization_hooks,
    )

    class Wrapped:
        def __init__(self, *hooks: object) -> None:
            self._comm_hooks = [(hook, None) for hook in hooks]

    def own(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        return torch.futures.Future()

    assert is_synchronising(object())  # a torch that does not say it
    assert is_synchronising(Wrapped())
    hook: Any
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        powerSGD_hook.batched_powerSGD_hook,
        quantization_hooks.quantization_pertensor_hook,
    ):
        assert is_synchronising(Wrapped(hook))
    for hook in (
        own,
        debugging_hooks.noop_hook,
        post_localSGD_hook.post_localSGD_hook,
        default_hooks.fp16_compress_wrapper(own),
        default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook)),
    ):
        assert not is_synchronising(Wrapped(default_hooks.allreduce_hook, hook))
