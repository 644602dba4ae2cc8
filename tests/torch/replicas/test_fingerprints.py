"""Fingerprints of one rank: when they are taken, of which parameters, and what they say of the training."""

from __future__ import annotations

import copy
import pickle
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

from notebook import Notebook, learn, model_of, ones, sgd, take_step, watched, watching
from rankwatch.measure.collectives import Traffic
from rankwatch.shared.types.fingerprint import ALL_ROWS, LANE_BYTES, Fingerprint
from rankwatch.shared.types.notice import NoticeKind, describe_notice

_optimizers: WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = WeakKeyDictionary()


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts rank 0 of 2, in a training that makes no process group."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def trained(model: nn.Module, steps: int = 1, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or _optimizers.setdefault(model, sgd(model, 0.1))
    for _ in range(steps):
        learn(model(ones()).sum(), optimizer)


def taken(notebook: Notebook) -> list[Fingerprint]:
    assert not notebook.faults
    assert all(fingerprint.fits(table) for table, fingerprint in notebook.fingerprints)
    return [fingerprint for _, fingerprint in notebook.fingerprints]


def moments(notebook: Notebook) -> list[tuple[int, int]]:
    return [(one.ordinal, one.slot) for one in taken(notebook)]


def lanes(notebook: Notebook, name: str) -> list[bytes]:
    """The checksums of one parameter, one after another."""
    found = []
    for table, fingerprint in notebook.fingerprints:
        for number, row in enumerate(table.rows_of(fingerprint.slot)):
            if row.parameter == name:
                found.append(fingerprint.lanes[LANE_BYTES * number : LANE_BYTES * (number + 1)])
    return found


def test_all_rows_at_first_and_then_slot_by_slot() -> None:
    model, _, notebook = watching()
    trained(model, 9)
    assert moments(notebook) == [(0, ALL_ROWS), (1, ALL_ROWS), (2, ALL_ROWS), *[(step, step % 4) for step in range(3, 9)]]
    assert {row.parameter for row in notebook.fingerprints[0][0].rows} == set(dict(model.named_parameters()))
    assert len(set(lanes(notebook, "0.weight"))) == 5  # it changes at each step


def test_equal_weights_have_equal_fingerprints() -> None:
    found = []
    for _ in range(2):
        model, _, notebook = watching(fingerprints=1)
        trained(model, 4)
        found.append(notebook.fingerprints)
    assert found[0] == found[1]
    assert all(fingerprint.slot in (ALL_ROWS, 0) for _, fingerprint in found[0])


@pytest.mark.parametrize("options", [{"fingerprints": 0}, {"count_all": True}])
def test_none_are_taken(options: dict[str, object]) -> None:
    model, _, notebook = watching(**options)
    trained(model, 3)
    assert taken(notebook) == []


def test_one_look_per_optimizer_step_whatever_runs_between() -> None:
    model, _, notebook = watching(every=3)
    optimizer = sgd(model, 0.1)
    for _ in range(3):
        model.eval()
        with torch.no_grad():
            model(ones())
        model.train()
        for _ in range(4):
            model(ones()).sum().backward()
        optimizer.step()
    assert [ordinal for ordinal, _ in moments(notebook)] == [0, 1, 2]


def test_an_evaluation_with_other_weights_is_not_looked_at() -> None:
    model, _, notebook = watching()
    trained(model)
    averaged = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    model.eval()
    model(ones())  # with gradients: it might have been a batch
    with torch.no_grad():
        for value, before in zip(model.parameters(), averaged.values(), strict=True):
            value.copy_(before)
    expected = [value.detach().clone() for value in model.parameters()]
    model.train()
    model(ones())
    assert [ordinal for ordinal, _ in moments(notebook)] == [0, 1]
    assert all(map(torch.equal, model.parameters(), expected))
    again = model_of()
    _, other = watched(again)
    trained(again, 2)
    assert lanes(notebook, "0.weight") == lanes(other, "0.weight")


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_training_in_eval_mode_and_one_by_direct_calls(is_direct: bool) -> None:
    model = model_of()
    model.eval()
    _, notebook = watched(model)
    optimizer = sgd(model, 0.1)
    for _ in range(3):
        learn((model[2](model[0](ones())) if is_direct else model(ones())).sum(), optimizer)
    assert [ordinal for ordinal, _ in moments(notebook)] == [0, 1, 2]


def test_a_step_in_the_backward_and_two_optimizers() -> None:
    model, _, notebook = watching()
    for value in model.parameters():
        optimizer = torch.optim.SGD([value], lr=0.1)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            take_step(optimizer)

        value.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        model(ones()).sum().backward()
    assert [ordinal for ordinal, _ in moments(notebook)] == [0, 1, 2, 3]


def test_an_optimizer_that_is_made_anew() -> None:
    model, _, notebook = watching()
    for _ in range(2):
        trained(model, 3, sgd(model, 0.1))
    assert [ordinal for ordinal, _ in moments(notebook)] == [0, 1, 2, 3, 4, 5]


def test_a_step_that_the_scaler_skips_is_none() -> None:
    model, _, notebook = watching(policy="off")
    optimizer = sgd(model, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
    for batch in range(4):
        optimizer.zero_grad()
        loss = model(ones()).sum()
        scaler.scale(loss * (torch.inf if batch == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [ordinal for ordinal, _ in moments(notebook)] == [0, 1, 2]


def test_weights_that_were_loaded_are_looked_at_all() -> None:
    model, _, notebook = watching()
    trained(model, 5)
    model[0].load_state_dict(copy.deepcopy(model[0].state_dict()))
    trained(model, 2)
    assert [one.is_loaded for one in taken(notebook)] == [False] * 5 + [True, False]
    assert moments(notebook)[5:] == [(5, ALL_ROWS), (6, 2)]


def test_a_change_of_the_model_makes_another_table() -> None:
    model, _, notebook = watching(fingerprints=1)
    trained(model, 4)
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    trained(model, 1)
    model[0].requires_grad_(False)
    trained(model, 1)
    model.append(nn.Linear(2, 2))
    trained(model, 1)
    tables = [table for table, _ in notebook.fingerprints]
    assert tables[3] is tables[0]
    assert tables[4] == tables[0]  # the same names and sizes
    assert [row.is_trainable for row in tables[5].rows] == [False, False, True, True]
    assert len(tables[6].rows) == 6
    assert [slot for _, slot in moments(notebook)][4:] == [0, ALL_ROWS, ALL_ROWS]


def test_a_copy_of_the_model_is_not_watched() -> None:
    model, _, notebook = watching()
    trained(model, 1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        trained(other, 2)
        other.load_state_dict(model.state_dict())
    trained(model, 1)
    assert [one.is_loaded for one in taken(notebook)] == [False, False]


def test_hooks_are_taken_away() -> None:
    model, detector, _ = watching()
    trained(model, 1)
    detector.remove()
    assert not any(module._load_state_dict_post_hooks for module in model.modules())


def test_what_talks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, detector, notebook = watching()
    detector._collectives.traffic = Traffic(has_talked=True)  # as the model was made
    trained(model, 2)
    detector._collectives.talk("allreduce", (torch.ones(16), torch.ones(4096, dtype=torch.uint8)))
    trained(model, 1)
    detector._collectives.talk("allreduce", ([torch.ones(17)],))
    trained(model, 2)
    assert [one.communicates for one in taken(notebook)] == [False, False, False, True, True]


@pytest.mark.parametrize(("started", "is_told"), [("2", True), ("1", False), ("", False)])
def test_ranks_of_torchrun_that_form_no_group_each_train_alone(
    monkeypatch: pytest.MonkeyPatch, started: str, is_told: bool
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", started or "2")
    if started:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    model, _, notebook = watching()
    optimizer = sgd(model)
    for _ in range(20):
        learn(model(ones()).sum(), optimizer)
    told = [describe_notice(one) for one in notebook.notices if one.kind is NoticeKind.ALONE]
    assert len(told) == is_told
    assert not told or "torchrun started 2 ranks, and by batch 15 this one has no process group" in told[0]
