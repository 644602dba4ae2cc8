"""The callbacks for frameworks, in one process, with the real libraries. With two ranks: ``tests/e2e/test_integrations.py``."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import rankwatch
from jobs import ROOT
from rankwatch.integrations import lightning_callbacks

ONES = {"x": torch.ones(4), "labels": torch.zeros(1)}


class Model(nn.Module):
    """A model that overflows in batch ``faulty``, counted from 0."""

    def __init__(self, faulty: int = -1) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.faulty, self.batches = faulty, 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.batches += self.training
        out = self.linear(x * (1e30 if self.training and self.batches == self.faulty + 1 else 1.0) ** 2)
        return {"loss": out.square().mean(), "logits": out}


class Data(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return ONES


class Endless(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        while True:
            yield ONES


# --- the Trainer of transformers ------------------------------------------------------------------------------------------


@pytest.fixture
def callback() -> type[Any]:
    """Our callback, a class of a module that imports transformers."""
    pytest.importorskip("transformers")
    from rankwatch.integrations.transformers import RankwatchCallback

    return RankwatchCallback


def hugging_face(folder: Path, model: nn.Module, callbacks: list[Any], data: Any = None, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", per_device_train_batch_size=2,
        max_steps=more.pop("max_steps", 4), save_strategy=more.pop("save_strategy", "no"), **more,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data or Data(), callbacks=callbacks)


def test_train_raises_after_all_other_callbacks_saw_its_end(callback: Any, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    heard: list[int] = []

    class Late(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            heard.append(state.global_step)

    model = Model(faulty=2)
    trainer = hugging_face(tmp_path, model, [callback()], save_strategy="steps", save_steps=1, disable_tqdm=False)
    trainer.add_callback(Late())
    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(rankwatch.OverflowDetected, match=r"batch 2: linear \(Linear\), output: nan"):
        trainer.train()
    assert heard == [3]
    assert trainer.callback_handler.callbacks == callbacks
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    model.faulty = -1
    trainer.pop_callback(callback)
    trainer.add_callback(callback())
    trainer.train()  # the next one is watched anew
    assert heard == [3, 4]


def test_a_training_without_a_length_counts_whole_steps(callback: Any, tmp_path: Path) -> None:
    first = hugging_face(tmp_path, Model(), [callback()], Endless(), max_steps=3, save_strategy="steps", save_steps=2,
                         gradient_accumulation_steps=2)  # fmt: skip
    first.train()
    again = hugging_face(tmp_path, Model(faulty=0), [callback()], Endless(), gradient_accumulation_steps=2)
    with pytest.raises(rankwatch.OverflowDetected, match="batch 4: linear"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_trainers_nan_filter_is_reported_when_it_is_on(
    callback: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rankwatch"):
        hugging_face(tmp_path, Model(), [callback()], logging_nan_inf_filter=False).train()
        assert "logging_nan_inf_filter" not in caplog.text
        hugging_face(tmp_path, Model(), [callback()]).train()
    assert "logging_nan_inf_filter=False shows them" in caplog.text


def test_their_detector_makes_room_with_its_policy(callback: Any, tmp_path: Path) -> None:
    class Clamped(Model):
        def __init__(self) -> None:
            super().__init__()
            self.clamp = nn.Hardtanh()  # makes what is not finite finite

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return super().forward(self.clamp(x * float("inf")), labels)

    model = Clamped()
    hugging_face(tmp_path, model, [callback()]).train()  # an input alone is healthy
    trainer = hugging_face(tmp_path, model, [callback()], debug="underflow_overflow")
    with pytest.raises(rankwatch.OverflowDetected, match=r"\(Hardtanh\), input\[0\]: inf"):
        trainer.train()


# --- Lightning ------------------------------------------------------------------------------------------------------------


def lightning_module(pl: Any, model: Model) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self(batch)  # its own forward

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(pl: Any, folder: Path, module: Any, callbacks: list[Any]) -> Any:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, default_root_dir=folder, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Data(), 2), DataLoader(Data(), 3))
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_a_copy_or_pickle_of_a_module_in_training_runs_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from rankwatch.integrations.lightning import RankwatchCallback

    module, copies = lightning_module(pl, Model()), []
    type(module).__qualname__ = "Pickled"
    monkeypatch.setattr(sys.modules[__name__], "Pickled", type(module), raising=False)

    class Average(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            trainer_of, module._trainer = module._trainer, None
            copies.extend([copy.deepcopy(module), pickle.loads(pickle.dumps(module))])
            module._trainer = trainer_of

    fit(pl, tmp_path, module, [RankwatchCallback(), Average()])
    for one in copies:
        before = module.net.batches, one.net.batches
        one.training_step(ONES, 0)
        assert (module.net.batches, one.net.batches) == (before[0], before[1] + 1)


@pytest.mark.parametrize("library", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.filterwarnings("ignore")
def test_lightning_on_one_device(tmp_path: Path, library: str) -> None:
    pl = pytest.importorskip(library)
    from rankwatch.integrations.lightning import RankwatchCallback

    callback = RankwatchCallback(check="frame")
    module = lightning_module(pl, Model(faulty=4))
    seen: list[set[str]] = []

    class Look(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *more: Any) -> None:
            assert callback.watch is not None
            seen.append(set(callback.watch.summaries()))

    with pytest.raises(
        rankwatch.OverflowDetected, match=r"batch 4: net\.linear \(Linear\), output: inf|batch 4: net\.linear"
    ):
        fit(pl, tmp_path, module, [callback, Look()])
    # One training_step is one batch, the LightningModule is its root, and names are relative to it.
    assert len(seen) == 4
    assert {"abs_max/(root)/output", "abs_max/net.linear/weight"} <= seen[0] == seen[3]
    assert callback.watch is not None
    assert callback.watch.optimizer_step == 4
    assert not {"training_step", "validation_step", "forward"} & module.__dict__.keys()  # as it was
    module.net.faulty = -1
    again = RankwatchCallback()
    trainer = fit(pl, tmp_path, module, [again])  # replaces the watch that the exception left open
    assert trainer.global_step == 9
    assert again.watch is None
    assert not {"training_step", "validation_step", "forward"} & module.__dict__.keys()
    assert not module._forward_hooks


@pytest.mark.filterwarnings("ignore")
def test_a_gan_that_lightning_lets_optimize_by_hand_has_two_losses(tmp_path: Path) -> None:
    """The backwards are in the ``training_step``, which is no batch there: each backward is one."""
    pl = pytest.importorskip("lightning.pytorch")
    from rankwatch.integrations.lightning import RankwatchCallback

    class Generator(nn.Linear):
        pass

    class Gan(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.rounds = False, 0
            self.generator, self.critic = Generator(4, 4), nn.Linear(4, 1)

        def training_step(self, batch: Any, number: int) -> None:
            ours, theirs = self.optimizers()
            if self.rounds == 7:
                nn.init.constant_(self.critic.bias, float("nan"))
            self.rounds += 1
            fake = self.generator(torch.ones(2, 4))
            self.learn((self.critic(fake.detach()) - self.critic(-fake.detach())).mean(), theirs)
            self.learn(-self.critic(fake).mean(), ours)

        def learn(self, loss: Tensor, optimizer: Any) -> None:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]

    callback = RankwatchCallback(check="frame")
    seen: list[set[str]] = []

    class Look(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *more: Any) -> None:
            seen.append({name for name in callback.watch.summaries() if "/loss" in name})  # type: ignore[union-attr]

    with pytest.raises(rankwatch.OverflowDetected, match=r"batch 14: critic \(Linear\), bias: nan"):
        fit(pl, tmp_path, Gan(), [callback, Look()])
    assert seen[4:] == [{"abs_max/loss of Generator", "abs_min/loss of Generator"}] * 3


@pytest.mark.filterwarnings("ignore")
def test_zero_code_finds_lightning_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from rankwatch.integrations.lightning import RankwatchCallback

    installed = tmp_path / "installed" / "rankwatch_entry-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rankwatch-entry\nVersion: 0\n")
    groups = dict(
        re.findall(r'\[project\.entry-points\."(.+)"\]\nrankwatch = "(.+)"', (ROOT / "pyproject.toml").read_text())
    )
    assert set(groups) == {"lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory"}
    entry = groups["lightning.pytorch.callbacks_factory"]
    (installed / "entry_points.txt").write_text(f"[lightning.pytorch.callbacks_factory]\nours = {entry}\n")
    monkeypatch.syspath_prepend(str(installed.parent))

    def ours(trainer: Any) -> int:
        return sum(isinstance(callback, RankwatchCallback) for callback in trainer.callbacks)

    monkeypatch.delenv("RANKWATCH_ATTACH", raising=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    assert ours(pl.Trainer(**quiet)) == 0
    monkeypatch.setenv("RANKWATCH_ATTACH", "1")
    assert ours(pl.Trainer(**quiet)) >= 1
    own = RankwatchCallback()
    module = lightning_module(pl, Model(faulty=0))
    with pytest.raises(rankwatch.OverflowDetected, match=r"batch 0: net\.linear"):
        fit(pl, tmp_path, module, [own])  # the script's own is the one that watches
    assert own.watch is not None
    own.watch.close()


def test_the_entry_point_imports_nothing_where_zero_code_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rankwatch.integrations.lightning", None)
    for value in ("", "0"):
        monkeypatch.setenv("RANKWATCH_ATTACH", value)
        assert lightning_callbacks() == []
    monkeypatch.setenv("RANKWATCH_ATTACH", "1")
    monkeypatch.setenv("RANKWATCH_MODE", "disabled")
    assert lightning_callbacks() == []


# --- DeepSpeed ------------------------------------------------------------------------------------------------------------


def test_the_model_in_a_deepspeed_engine() -> None:
    from rankwatch.measure.modules import unwrap

    class DeepSpeedEngine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class Derived(DeepSpeedEngine):
        pass

    inner = nn.Linear(2, 2)
    assert unwrap(Derived(inner)) is inner
