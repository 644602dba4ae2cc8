"""A small training, ``frameworks.py FRAMEWORK FOLDER [VARIANT]``: rank 1 overflows in one forward, in ``block.gain``.

Variant ``plain`` leaves our callback out. FRAMEWORK ``guarded_...``: instead, in batch 5 a gradient of rank 1 is nan, and each
rank says at the end whether its weights are finite.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import rankwatch

RANK = int(os.environ["RANK"])
VARIANT = "".join(sys.argv[3:])
FAULTY_RANK = 1
BAD = 5
"""Two samples a batch, every other one is this rank's: those of rank 1's batch 5 are 0 where a gradient is to be nan."""


class Gain(nn.Module):
    def forward(self, x: Tensor, gain: float) -> Tensor:
        return x * gain * gain


class Length(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True).sqrt()  # its slope at 0 is infinite


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.gain = Gain()

    def forward(self, x: Tensor, gain: float) -> Tensor:
        return torch.tanh(self.gain(self.linear(x), gain))


class Model(nn.Module):
    """Overflows in forward number ``fault_at`` (forwards in training mode, from 0); -1: never."""

    def __init__(self, fault_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.length, self.head = Block(), Length(), nn.Linear(8, 1)
        self.fault_at = fault_at
        self.forwards = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        gain = 1e30 if self.training and (self.forwards, RANK) == (self.fault_at, FAULTY_RANK) else 1.0
        self.forwards += self.training and self.fault_at >= 0  # what changes is not run again
        x = self.block(x, gain)
        logits = self.head(x * self.length(x))
        return {"loss": logits.square().mean(), "logits": logits}

    def state(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]


class Data(Dataset[dict[str, Tensor]]):
    """``bad``: the samples that are 0."""

    def __init__(self, length: int, bad: tuple[int, ...] = ()) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), 0.1 * (index % 7 + 1) * (index not in self.bad)), "labels": torch.zeros(1)}


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def told(model: Model) -> Iterator[None]:
    try:
        yield
    finally:
        are_finite = all(bool(value.isfinite().all()) for value in model.parameters())
        print(f"rank {RANK}: weights {'finite' if are_finite else 'BAD'}", flush=True)


def trainer(folder: Path) -> None:
    """Five micro-batches an epoch, two a step: steps of 2, 2 and 1. Trains to step 4, resumes there, then overflows."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Witness(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.before: list[Tensor] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.before = more["model"].state()

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            kept = same(self.before, more["model"].state())
            print(
                f"rank {RANK}: on_train_end at step {state.global_step}, weights {'kept' if kept else 'changed'}", flush=True
            )

    def train(fault_at: int, max_steps: int, **more: Any) -> None:
        resume = more.pop("resume", None)
        arguments = TrainingArguments(
            **of_trainer(folder / "checkpoints"), max_steps=max_steps, logging_steps=1,
            save_steps=1, eval_strategy="steps", eval_steps=2, **more,
        )  # fmt: skip
        model = Model(fault_at)
        callbacks: list[TrainerCallback] = [Witness()]
        if VARIANT != "plain":
            from rankwatch.integrations.transformers import RankwatchCallback

            callbacks = [RankwatchCallback(), Witness()]
        data, few = Data(20), Data(4)
        Trainer(model, arguments, train_dataset=data, eval_dataset=few, callbacks=callbacks).train(
            resume_from_checkpoint=resume
        )

    if VARIANT == "plain":
        train(3, 4, debug="underflow_overflow")
    train(-1, 4)
    train(1, 7, resume=str(folder / "checkpoints" / "checkpoint-4"), debug="underflow_overflow")
    print("the script went on", flush=True)


def of_trainer(folder: Path) -> dict[str, Any]:
    """Two micro-batches a step."""
    return {
        **{"output_dir": str(folder), "use_cpu": True, "ddp_backend": "gloo", "report_to": "none", "disable_tqdm": True},
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    }


def guarded_trainer(folder: Path) -> None:
    """Each rank takes every other batch of two samples."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    from rankwatch.integrations.transformers import RankwatchCallback

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(**of_trainer(folder), save_strategy="no", max_steps=8, num_train_epochs=1)
    data, model = Data(32, (4 * BAD + 2, 4 * BAD + 3)), Model()
    with told(model):
        InOrder(model, arguments, train_dataset=data, callbacks=[RankwatchCallback()]).train()


def lightning_module(fault_at: int = -1, asserts: bool = False) -> Any:
    """``asserts``: the training looks at the norm itself."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Model(fault_at)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            for value in self.parameters() if asserts else ():
                assert value.grad.isfinite().all(), "the training's own look"

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


OF_LIGHTNING: dict[str, Any] = {
    **{"accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False},
    **{"enable_progress_bar": False, "enable_model_summary": False},
}


def guarded_lightning(folder: Path, asserts: bool = False) -> None:
    """The training deals the samples one by one to the ranks."""
    import lightning.pytorch as pl

    from rankwatch.integrations.lightning import RankwatchCallback

    fit = pl.Trainer(
        **OF_LIGHTNING, max_epochs=1, default_root_dir=folder, callbacks=[RankwatchCallback()],
        gradient_clip_val=1.0, enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    data, module = Data(32, (4 * BAD + 1, 4 * BAD + 3)), lightning_module(asserts=asserts)
    with told(module.net):
        fit.fit(module, DataLoader(Subset(data, range(RANK, 32, 2)), 2))


def guarded_asserting(folder: Path) -> None:
    guarded_lightning(folder, asserts=True)


def lightning(folder: Path) -> None:
    """Two batches a step, four an epoch."""
    import lightning.pytorch as pl

    class Witness(pl.Callback):  # type: ignore[misc]
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            print(f"rank {RANK}: on_exception at step {trainer.global_step}: {type(exception).__name__}", flush=True)

    def fit(fault_at: int, max_epochs: int, resume: str | None = None) -> str:
        callbacks: list[pl.Callback] = [Witness()]
        if VARIANT != "plain":
            from rankwatch.integrations.lightning import RankwatchCallback

            callbacks = [RankwatchCallback(), Witness()]
        fit = pl.Trainer(
            **OF_LIGHTNING, max_epochs=max_epochs, accumulate_grad_batches=2, default_root_dir=folder, callbacks=callbacks,
        )  # fmt: skip
        fit.fit(
            lightning_module(fault_at), DataLoader(Data(16), 2), DataLoader(Data(4), 2), ckpt_path=resume, weights_only=False
        )
        return str(fit.checkpoint_callback.best_model_path)

    fit(3, 4, resume=fit(-1, 2))
    print("the script went on", flush=True)


def accelerate(folder: Path) -> None:
    """Half precision; the model is watched before it is prepared, or after."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model: nn.Module = Model(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = rankwatch.watch(model) if VARIANT == "before" else None
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Data(16), 2))
    with watch or rankwatch.watch(model):
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def guarded_accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    inner, data = Model(), Data(32, (4 * BAD + 2, 4 * BAD + 3))
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(inner, optimizer, DataLoader(data, 2))
    with told(inner), rankwatch.watch(model):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


def deepspeed(folder: Path) -> None:
    """ZeRO. Its optimizer holds copies, not the model's parameters, so only the engine knows when a step was made."""
    import deepspeed as ds

    dist.init_process_group("gloo")
    model = Model(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": int(VARIANT)},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    with rankwatch.watch(engine) as watch:
        for batch in DataLoader(Data(16), 2):
            watch.optimizer_step = engine.global_steps
            engine.backward(engine(**batch)["loss"])
            engine.step()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    globals()[sys.argv[1]](Path(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
