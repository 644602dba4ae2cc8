"""What a process has done beside its training: the file that it saved last, and a run of W&B that it opened late."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import rankwatch
from rankwatch.api import aside as module
from rankwatch.api.aside import aside, see_saves
from rankwatch.shared.types.frame import Whereabouts


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    monkeypatch.setattr(module, "_last", "")
    see_saves()
    model = nn.Linear(4, 1)
    with rankwatch.watch(model):
        yield model


def test_the_file_that_was_saved_last_is_told_with_its_batch(model: nn.Module, tmp_path: Path) -> None:
    assert aside(Whereabouts()) == ()
    for batch in range(3):
        model(torch.ones(2, 4)).sum().backward()
        torch.save(model.state_dict(), tmp_path / f"{batch}.pt")
    assert aside(Whereabouts()) == (f"saved: {tmp_path}/2.pt, after batch 2",)
    with (tmp_path / "open.pt").open("wb") as file:
        torch.save({}, file)
    assert aside(Whereabouts()) == (f"saved: {tmp_path}/open.pt, after batch 2",)
    torch.save({}, io.BytesIO())  # a copy in memory
    assert aside(Whereabouts()) == (f"saved: {tmp_path}/open.pt, after batch 2",)
    assert torch.load(tmp_path / "2.pt").keys() == model.state_dict().keys()


def test_so_is_a_distributed_checkpoint(model: nn.Module, tmp_path: Path) -> None:
    where = str(tmp_path / "step-0")
    dcp.save({"model": model.state_dict()}, checkpoint_id=where, no_dist=True)  # type: ignore[attr-defined]
    assert aside(Whereabouts()) == (f"saved: {tmp_path}/step-0",)


def test_a_save_that_fails_is_none(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save({}, tmp_path / "no" / "folder.pt")
    assert aside(Whereabouts()) == ()


def test_a_run_of_wandb_that_is_opened_late(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = ModuleType("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert aside(Whereabouts()) == ()
    wandb.run = SimpleNamespace(url="https://wandb.ai/ann/demo/runs/1")  # type: ignore[attr-defined]
    assert aside(Whereabouts()) == ("wandb: https://wandb.ai/ann/demo/runs/1",)
