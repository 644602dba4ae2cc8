"""A training of two ranks in a framework, ``guarded_frameworks.py FRAMEWORK FOLDER``: in batch 5 a gradient of rank 1 is nan."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rankwatch

RANK = int(os.environ["RANK"])
BAD = 5
"""Two samples a batch, every other one is this rank's: those of rank 1's batch 5 are 0."""


class Length(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True).sqrt()  # its slope at 0 is infinite


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.length, self.head = nn.Linear(8, 8, bias=False), Length(), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.first(x)
        logits = self.head(x * self.length(x))
        return {"loss": logits.square().mean(), "logits": logits}


class Data(Dataset[dict[str, Tensor]]):
    """In the order in which it is dealt: the samplers do not shuffle."""

    def __init__(self, batches: int = 8) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 4 * self.batches

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.full((8,), 0.1 * (index % 7 + 1))
        return {"x": x * float(index not in self.bad), "labels": torch.zeros(1)}

    bad: tuple[int, ...] = ()


def say(model: nn.Module) -> None:
    are_finite = all(bool(value.isfinite().all()) for value in model.parameters())
    print(f"rank {RANK}: weights {'finite' if are_finite else 'BAD'}", flush=True)


def trainer(folder: Path) -> None:
    """Two micro-batches a step. Each rank takes every other batch of two samples."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    from rankwatch.integrations.transformers import RankwatchCallback

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, ddp_backend="gloo", report_to="none", disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=8, num_train_epochs=1,
    )  # fmt: skip
    data = Data()
    data.bad = (4 * BAD + 2, 4 * BAD + 3)
    model = Model()
    try:
        InOrder(model, arguments, train_dataset=data, callbacks=[RankwatchCallback()]).train()
    finally:
        say(model)


def lightning(folder: Path, asserts: bool = False) -> None:
    """The sampler deals the samples one by one to the ranks. ``asserts``: the training looks at the norm itself."""
    import lightning.pytorch as pl

    from rankwatch.integrations.lightning import RankwatchCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            if asserts:
                for value in self.parameters():
                    assert value.grad is not None
                    assert value.grad.isfinite().all(), "the training's own look"

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    data = Data()
    data.bad = (4 * BAD + 1, 4 * BAD + 3)
    fit = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, default_root_dir=folder,
        callbacks=[RankwatchCallback()], enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=1.0, enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = Module()
    rank = list(range(RANK, len(data), 2))
    try:
        fit.fit(module, DataLoader(torch.utils.data.Subset(data, rank), 2))
    finally:
        say(module)


def accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    data = Data()
    data.bad = (4 * BAD + 2, 4 * BAD + 3)
    model: Any = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 2))
    try:
        with rankwatch.watch(model):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        say(model)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asserting = partial(lightning, asserts=True)
    trainings: dict[str, Callable[[Path], None]] = {
        "trainer": trainer,
        "lightning": lightning,
        "asserting": asserting,
        "accelerate": accelerate,
    }
    trainings[sys.argv[1]](Path(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
